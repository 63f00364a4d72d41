"""Tags against the truth: a state machine, a seeded random drive, and the single cases by hand."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvq.integrity.table import DISPUTED, SERIAL_LIMIT, STAND_IN, PageTags, Violation, Writes, read_verdict
from tests.integrity.drive import drive
from tests.integrity.machine import Machine
from tests.integrity.put_off import PutOffTags

PAGE_SIZES = (1, 4)


class TagsMachine(RuleBasedStateMachine):
    """Hypothesis chooses and shrinks; `Machine` compares at every check."""

    page_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(self.page_size)

    def row(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.machine.requests)))

    @rule(tokens=st.integers(1, 12))
    def admit(self, tokens: int) -> None:
        self.machine.admit(tokens)

    @precondition(lambda self: self.machine.nodes)
    @rule(tokens=st.integers(1, 6), data=st.data())
    def share(self, tokens: int, data: st.DataObject) -> None:
        node = self.machine.nodes[data.draw(st.integers(0, len(self.machine.nodes) - 1))]
        self.machine.admit(tokens, node, data.draw(st.integers(1, len(node.entries))))

    @precondition(lambda self: self.machine.requests)
    @rule(tokens=st.integers(1, 3), data=st.data())
    def grow(self, tokens: int, data: st.DataObject) -> None:
        self.machine.grow(self.row(data), tokens)

    @precondition(lambda self: self.machine.requests)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        self.machine.cache(self.row(data))

    @precondition(lambda self: self.machine.requests)
    @rule(keep=st.booleans(), data=st.data())
    def finish(self, keep: bool, data: st.DataObject) -> None:
        self.machine.finish(self.row(data), keep=keep)

    @precondition(lambda self: self.machine.nodes)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.machine.evict(self.machine.nodes[data.draw(st.integers(0, len(self.machine.nodes) - 1))])

    @precondition(lambda self: self.machine.used_pages())
    @rule(double=st.booleans(), data=st.data())
    def fault_in_allocator(self, double: bool, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.machine.used_pages()))
        self.machine.fault_double(page) if double else self.machine.fault_free(page)

    @precondition(lambda self: self.machine.requests)
    @rule(data=st.data())
    def fault_in_page_table(self, data: st.DataObject) -> None:
        row = self.row(data)
        index = data.draw(st.integers(0, len(self.machine.requests[row].entries) - 1))
        self.machine.fault_swap(row, index, data.draw(st.integers(1, self.machine.num_pages)))

    @rule()
    def check(self) -> None:
        self.machine.recover(self.machine.check())

    @invariant()
    def sound_while_nothing_went_wrong(self) -> None:
        if not self.machine.faulty:
            self.machine.accounts()

    def teardown(self) -> None:
        self.machine.check()
        self.machine.idle()


class TagsMachineOfFourTokens(TagsMachine):
    page_size = 4


CI = settings(max_examples=15, stateful_step_count=30, deadline=None, derandomize=True)
TestOneToken = TagsMachine.TestCase
TestOneToken.settings = CI
TestFourTokens = TagsMachineOfFourTokens.TestCase
TestFourTokens.settings = CI


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_drive_never_misses_and_never_cries_wolf(page_size: int) -> None:
    tally = drive(3000, seed=7, page_size=page_size, fault_rate=0.05)
    assert tally.violations > 20 and tally.healthy_checks > 300


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_no_alarm_without_faults(page_size: int) -> None:
    assert drive(1000, seed=11, page_size=page_size, fault_rate=0).violations == 0


def tags_with(rows: dict[int, list[int]], page_size: int = 1) -> PageTags:
    """Rows that were given these pages."""
    slots_RS = torch.zeros((4, 8 * page_size), dtype=torch.int32)
    tags = PageTags(slots_RS, 16, page_size)
    for row, pages in rows.items():
        point(tags, row, 0, pages)
        tags.grow(ints(row), ints(0), ints(len(pages) * page_size), len(pages))
    return tags


def point(tags: PageTags, row: int, at: int, pages: list[int]) -> None:
    for index, page in enumerate(pages, start=at):
        first = index * tags.page_size
        tags.slots_RS[row, first : first + tags.page_size] = torch.arange(tags.page_size) + page * tags.page_size


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def verdict(tags: PageTags, *rows: int) -> dict[int, Violation]:
    found = read_verdict(tags.check(ints(*rows), 8, writes=None).tolist()[:-1])
    return {rows[at]: violation for at, violation in found.items()}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_use_after_free_names_page_and_both_tags(page_size: int) -> None:
    tags = tags_with({0: [3, 4], 1: [5]}, page_size)
    expected = int(tags.tag_P[4])
    tags.free(ints(4))
    assert verdict(tags, 0, 1) == {0: Violation(index=1, page=4, expected_tag=expected, found_tag=-expected)}
    point(tags, 2, 0, [4])
    tags.grow(ints(2), ints(0), ints(page_size), 1)
    found = verdict(tags, 0, 1, 2)
    assert found == {0: Violation(1, 4, expected, int(tags.tag_P[4]))} and int(tags.tag_P[4]) > expected
    assert str(found[0]) == (
        f"page 4 at position 1 of its page table is held: expected tag {expected}, found {int(tags.tag_P[4])}"
    )


def test_the_holder_of_a_page_given_twice_keeps_it() -> None:
    tags = tags_with({0: [3], 1: [3, 5]})
    assert set(verdict(tags, 0, 1)) == {1}


def test_one_of_two_that_are_given_a_page_in_one_step_fails() -> None:
    tags = tags_with({})
    point(tags, 0, 0, [3])
    point(tags, 1, 0, [3])
    tags.grow(ints(0, 1), ints(0, 0), ints(1, 1), 1)
    assert len(verdict(tags, 0, 1)) == 1


def test_entries_swapped_between_requests_fail_though_both_pages_are_held() -> None:
    tags = tags_with({0: [3, 4], 1: [5, 6]})
    point(tags, 0, 1, [6])
    point(tags, 1, 1, [4])
    assert set(verdict(tags, 0, 1)) == {0, 1}


def test_the_padding_page_is_never_valid() -> None:
    tags = tags_with({0: [0], 1: [3]})
    assert set(verdict(tags, 0, 1)) == {0}
    assert int(tags.tag_P[0]) == 0


def test_a_page_that_the_cache_lost_fails_for_whoever_the_cache_gives_it_to() -> None:
    """Also when it has a new holder, and when that one has handed it to the cache too."""
    tags = tags_with({0: [3, 4]})
    tags.give_to_cache(0, 0, 2)
    tags.free(ints(4))  # not an eviction
    point(tags, 1, 0, [4])
    tags.grow(ints(1), ints(0), ints(1), 1)
    point(tags, 2, 0, [3, 4])
    tags.adopt(2, 0, 2)
    tags.grow(ints(2), ints(2), ints(2), 1)
    assert set(verdict(tags, 1, 2)) == {2}
    tags.give_to_cache(1, 0, 1)
    assert int(tags.cached_P[4]) == DISPUTED
    tags.adopt(2, 0, 2)
    assert set(verdict(tags, 1, 2)) == {2}
    assert tags.cache_mismatches(ints(3, 4)).tolist() == [False, True]


def test_a_page_that_a_row_names_twice_is_disputed() -> None:
    tags = tags_with({0: [4, 3]})
    point(tags, 0, 0, [3])
    tags.give_to_cache(0, 0, 2)
    assert int(tags.cached_P[3]) == DISPUTED


def test_an_eviction_ends_the_cache_s_claim() -> None:
    tags = tags_with({0: [3]})
    tags.give_to_cache(0, 0, 1)
    tags.evict(ints(3))
    tags.free(ints(3))
    point(tags, 1, 0, [3])
    tags.grow(ints(1), ints(0), ints(1), 1)
    tags.give_to_cache(1, 0, 1)
    assert not tags.cache_mismatches(ints(3)).any() and verdict(tags, 1) == {}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_failed_row_is_pointed_at_the_padding_page_before_the_forward(page_size: int) -> None:
    tags = tags_with({0: [3, 4], 1: [5, 6]}, page_size)
    tags.free(ints(4))
    before = tags.slots_RS.clone()
    writes = Writes(torch.arange(50, 57), ints(3, 4))
    tags.check(ints(0, 1), 8, writes=writes)
    assert writes.slots_T is not None and writes.slots_T.tolist() == [0, 0, 0, 53, 54, 55, 56]
    assert tags.slots_RS[0].tolist() == [
        *before[0, :page_size].tolist(), *range(page_size), *before[0, 2 * page_size :].tolist()
    ]  # fmt: skip
    assert torch.equal(tags.slots_RS[1:], before[1:])


def test_a_check_that_only_reports_changes_nothing() -> None:
    tags = tags_with({0: [3, 4]})
    tags.free(ints(4))
    before = tags.slots_RS.clone()
    assert set(verdict(tags, 0)) == {0} and torch.equal(before, tags.slots_RS)


def test_double_frees_are_counted_in_the_last_row() -> None:
    tags = tags_with({0: [3, 4]})
    tags.free(ints(3, 4))
    tags.free(ints(4))
    assert tags.check(ints(0), 2, writes=None)[-1].tolist() == [0, 1, 0, 0]


def test_a_settled_row_frees_what_it_was_given_and_no_foreign_page() -> None:
    tags = tags_with({0: [3, 4, 5], 1: [6]})
    tags.free(ints(4))  # gone
    point(tags, 0, 2, [6])  # overwritten: 5 was there
    assert tags.settle_row(0, 0, 3, lambda count: ints(*range(10, 10 + count))) == 2
    assert tags.slots_RS[0, :3].tolist() == [3, 10, 11]
    assert verdict(tags, 0, 1) == {}
    named = [3, 6, 10, 11]
    assert tags.orphans(ints(*named)).tolist() == [5]
    assert tags.orphans(ints(*named, 5)).tolist() == []


def test_a_row_that_cannot_be_settled_is_left_alone() -> None:
    tags = tags_with({0: [3, 4]})
    tags.free(ints(4))
    assert tags.settle_row(0, 0, 2, lambda count: None) is None
    assert tags.slots_RS[0, :2].tolist() == [3, 4]


def test_a_stand_in_keeps_its_place_in_the_cache_but_is_never_read() -> None:
    tags = tags_with({0: [3, 4]})
    tags.give_to_cache(0, 0, 2)
    tags.free(ints(4))
    tags.hold(9)
    tags.stand_in(4, 9)
    assert tags.cached_P[[4, 9]].tolist() == [0, STAND_IN]
    assert not tags.cache_mismatches(ints(3, 9)).any()
    point(tags, 1, 0, [3, 9])
    tags.adopt(1, 0, 2)
    tags.grow(ints(1), ints(2), ints(2), 1)
    assert set(verdict(tags, 1)) == {1}


def test_the_free_list_loses_held_and_second_copies_and_keeps_its_order() -> None:
    tags = tags_with({0: [3]})
    assert tags.sound_free_list(ints(9, 3, 7, 9, 0, 8)).tolist() == [9, 7, 8]


def test_an_emptied_pool_starts_again() -> None:
    tags = tags_with({0: [3, 4]})
    tags.give_to_cache(0, 0, 1)
    tags.reset()
    assert (tags.tag_P <= 0).all() and not tags.cached_P.any()
    tags.grow(ints(0), ints(0), ints(2), 2)
    assert verdict(tags, 0) == {}


def test_serials_start_again_at_one_before_they_overflow() -> None:
    tags = tags_with({})
    tags._next_serial = SERIAL_LIMIT - 3
    assert [tags.take_serials(2), tags.take_serials(2)] == [SERIAL_LIMIT - 3, 1]


def calls(tags: PageTags) -> dict[str, Callable[[], object]]:
    """One call of every public method, where all may be called one after the other."""
    none_B, one_B = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    return {
        "grow": lambda: tags.grow(none_B, none_B, one_B, 1),
        "check": lambda: tags.check(none_B, 1, writes=None),
        "adopt": lambda: tags.adopt(0, 0, 1),
        "cache_mismatches": lambda: tags.cache_mismatches(one_B),
        "held": lambda: tags.held(one_B),
        "settle_row": lambda: tags.settle_row(0, 0, 1, lambda count: None),
        "hold": lambda: tags.hold(1),
        "stand_in": lambda: tags.stand_in(1, 2),
        "orphans": lambda: tags.orphans(one_B),
        "pages_of": lambda: tags.pages_of(0),
        "sound_free_list": lambda: tags.sound_free_list(one_B),
        "forget_cache": lambda: tags.forget_cache(),
        "reset": lambda: tags.reset(),
    }


PUT_OFF = {"free", "evict", "give_to_cache"}


def test_every_operation_is_known() -> None:
    public = {name for name, value in vars(PageTags).items() if callable(value) and not name.startswith("_")}
    assert public == {*calls(PageTags(torch.ones((1, 4), dtype=torch.int32), 4, 1)), *PUT_OFF, "take_serials", "apply"}


@pytest.mark.parametrize("name", calls(PageTags(torch.ones((1, 4), dtype=torch.int32), 4, 1)))
def test_whatever_reads_the_table_applies_first_what_was_put_off(name: str) -> None:
    """`PutOffTags` refuses to be read before."""
    tables = []
    for tags_class in (PageTags, PutOffTags):
        tags = tags_class(torch.ones((1, 4), dtype=torch.int32), 4, 1)
        tags.grow(torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.ones(1), 1)
        tags.give_to_cache(0, 0, 1)
        tags.evict(torch.ones(1, dtype=torch.int64))
        tags.free(torch.ones(1, dtype=torch.int64))
        result = calls(tags)[name]()
        tables.append([tags.tag_P, tags.cached_P, tags.named_P, tags.double_frees, tags.record_RJ, result])
    for plain, put_off in zip(*tables, strict=True):
        torch.testing.assert_close(put_off, plain, rtol=0, atol=0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_put_off_it_never_misses_either(page_size: int) -> None:
    machine = Machine(page_size, tags_class=PutOffTags)
    tally = drive(2000, seed=11, page_size=page_size, fault_rate=0.05, machine=machine)
    assert tally.violations > 10

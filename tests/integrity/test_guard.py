"""The guard on a scheduler that only has what the guard asks of it: batches, verdicts, ranks, clocks."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.errors import RecipeError
from kvq.integrity import hooks
from kvq.integrity.counters import Counters
from kvq.integrity.guard import EXPORT_SECONDS, Guard
from kvq.integrity.ranks import agree, least, lifted, lower
from kvq.integrity.settings import Mode
from tests.integrity.stub_scheduler import PAGES, PagedTokenToKVPoolAllocator, batch, make_guard, request


def free(guard: Guard, *pages: int) -> None:
    guard.freed(torch.tensor(pages))


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What the other rank brings to a collective, by the name of the group."""
    brought: dict[str, Tensor] = {}

    def all_reduce(mine: Tensor, op: Any, group: str) -> None:
        combine = torch.maximum if op == torch.distributed.ReduceOp.MAX else torch.minimum
        mine.copy_(combine(mine, brought[group].to(mine.dtype)))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return brought


@pytest.mark.parametrize("idle", [True, False])
def test_an_idle_rank_checks_nothing_and_waits_for_nobody(idle: bool, other_rank: dict[str, Tensor]) -> None:
    """DP attention: a rank without requests runs along with an empty batch. A collective would be a KeyError here."""
    guard = make_guard(ranks=2)
    guard.before_forward(batch(idle=idle))
    guard.before_forward(batch(request(guard, 0, 2), idle=True))
    guard.before_results(batch(idle=idle))
    assert guard.counters.checks == 0 and not guard._pending


def test_the_results_of_an_idle_batch_are_no_trouble_for_verdicts_under_way() -> None:
    guard = make_guard()
    req = request(guard, 0, 2)
    free(guard, 1)
    guard.before_forward(batch(req))
    guard.before_results(batch(idle=True))
    assert guard.counters.violations == 1


def test_a_batch_s_results_wait_for_its_own_verdict_and_no_later_one() -> None:
    guard = make_guard()
    first, second = request(guard, 0, 2), request(guard, 1, 2)
    free(guard, 2)
    running = batch(first)
    guard.before_forward(running)
    guard.before_forward(batch(first, second))
    guard.before_results(running)
    assert guard.counters.violations == 1 and len(guard._pending) == 1
    assert guard.counters.checks == 3


def test_a_batch_that_changes_after_its_check_does_not_move_the_verdict() -> None:
    guard = make_guard()
    first, second = request(guard, 0, 2), request(guard, 1, 2)
    free(guard, 3)
    running = batch(first, second)
    guard.before_forward(running)
    running.reqs.reverse()
    guard.read_all()
    assert guard.counters.last_violation.startswith("request r1: page 3 ")


@pytest.mark.parametrize(("page_size", "old", "new", "lost"), [(1, 3, 5, 5), (4, 3, 9, 3), (4, 4, 5, 2), (4, 4, 8, 2)])
def test_reserved_places_of_speculation_are_recorded_to_the_last_page(
    page_size: int, old: int, new: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lost` is the last page of the reserve. A draft writes where the page table says; its batch has no list."""
    guard = make_guard(page_size)
    monkeypatch.setattr(hooks, "_GUARD", guard)
    req = request(guard, 0, old)
    have = -(-old // page_size)
    slots_N = guard.allocator.alloc((-(-new // page_size) - have) * page_size)
    guard.tags.slots_RS[0, have * page_size : have * page_size + len(slots_N)] = slots_N.int()
    old_B, new_B = torch.tensor([old]), torch.tensor([new])
    hooks.after_alloc_for_spec_decode(
        None, req_pool_indices=torch.tensor([0]), cur_kv_lens=old_B, nxt_kv_lens=new_B, cur_kv_lens_cpu=old_B,
        nxt_kv_lens_cpu=new_B,
    )  # fmt: skip
    req.kv.kv_allocated_len = new
    guard.before_forward(batch(req, plain=False))
    guard.read_all()
    assert guard.counters.violations == 0
    free(guard, lost)
    guard.before_forward(batch(req, plain=False))
    guard.read_all()
    assert guard.counters.last_violation.startswith(f"request r0: page {lost} ")


def test_what_one_rank_sees_ends_the_request_on_the_other(other_rank: dict[str, Tensor]) -> None:
    guard = make_guard(ranks=2)
    reqs = [request(guard, 0, 2), request(guard, 1, 2)]
    other_rank["device"] = torch.tensor([[0, 0, 0, 0], [2, 7, 4, -4 + 2**32], [0, 3, 0, 0]])
    guard.before_forward(batch(*reqs))
    guard.read_all()
    assert guard.counters.last_violation == (
        "request r1: page 7 at position 1 of its page table is free: expected tag 4, found -4"
    )
    assert guard.counters.double_frees == 3


def test_ranks_agree_when_the_forward_under_way_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device: NCCL wants the collectives of the verdict and of the forward in one order on all ranks."""
    guard = make_guard(ranks=2)
    order: list[str] = []
    wait_stream = lambda other: order.append(f"wait for {other}")  # noqa: E731
    guard.scheduler.schedule_stream = SimpleNamespace(wait_stream=wait_stream)
    guard.scheduler.forward_stream = "the forward"
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: order.append("all-reduce"))
    monkeypatch.setattr(guard, "_writes", lambda _: None)
    monkeypatch.setattr(guard, "_send", lambda *_: None)
    monkeypatch.setattr(guard.tags, "check", lambda *_, **__: torch.zeros((2, 4), dtype=torch.int32))
    guard.on_gpu = True
    guard.before_forward(batch(request(guard, 0, 2)))
    assert order == ["wait for the forward", "all-reduce"]


def test_the_tag_of_a_freed_page_is_kept_against_a_sound_rank(other_rank: dict[str, Tensor]) -> None:
    group = SimpleNamespace(device_group="device", cpu_group="cpu")
    other_rank["device"] = torch.zeros((2, 4), dtype=torch.int64)
    mine = torch.tensor([[2, 7, 4, -4], [0, 1, 0, 0]], dtype=torch.int32)
    values = agree(lifted(mine), group, lambda: None).tolist()
    lower(values)
    assert values == mine.tolist()
    other_rank["cpu"] = torch.tensor([5])
    assert [least([count], group) for count in (4, 6)] == [[4], [5]]


def test_a_sweep_s_finding_reaches_all_ranks_with_the_next_verdict(other_rank: dict[str, Tensor]) -> None:
    """Their clocks differ: each on its own would turn to a fresh cache in another step."""
    guard = make_guard(ranks=2)
    req = request(guard, 0, 2)
    guard.allocator.free_pages = torch.cat([torch.tensor([1]), guard.allocator.free_pages])
    other_rank["device"] = torch.zeros((2, 4), dtype=torch.int64)
    guard._sweep()
    guard._sweep()
    assert guard.counters.sweep_violations == 0
    guard.before_forward(batch(req))
    guard.before_forward(batch(req))
    guard.read_all()
    assert guard.counters.sweep_violations == 1 and guard.allocator.free_pages[0] == 3
    other_rank["device"] = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 0]])
    guard.before_forward(batch(req))
    guard.read_all()
    assert guard.counters.sweep_violations == 2 and guard.incidents.namespace == 1


def test_ranks_plan_with_as_many_free_pages_until_all_is_in_order(other_rank: dict[str, Tensor]) -> None:
    guard = make_guard(ranks=2)
    other_rank["cpu"] = torch.tensor([PAGES - 3])
    guard.next_step()  # sound: nobody waits for anybody
    assert guard.incidents.free_pages() == PAGES
    guard.incidents.unsettled = guard._worked = True
    guard.scheduler.running_batch = SimpleNamespace(is_empty=lambda: False, reqs=[])
    guard.next_step()
    assert guard.incidents.free_pages() == PAGES - 3
    guard.idle()
    assert guard.incidents.free_pages() == PAGES and not guard.incidents.unsettled


@pytest.mark.parametrize(("theirs", "freed"), [(1, 3), (0, 0)])
def test_what_one_rank_cannot_settle_is_freed_by_none(theirs: int, freed: int, other_rank: dict[str, Tensor]) -> None:
    guard = make_guard(ranks=2)
    req = request(guard, 0, 3)
    req.cache_protected_len, req.kv_committed_len = 0, 3
    guard.scheduler.running_batch = SimpleNamespace(is_empty=lambda: False, reqs=[req])
    guard.incidents.unsettled, guard.incidents._failed[id(req)] = True, req
    other_rank["cpu"] = torch.tensor([PAGES, theirs])
    guard.next_step()
    assert req.kv.kv_allocated_len == 3  # it may go on running until it ends
    guard.releasing(req)
    assert (req.kv.kv_allocated_len, req.kv_committed_len) == (freed, freed)
    guard.incidents.ended(req)
    assert not guard.incidents.failed(req) and not guard.incidents._given_up


@pytest.mark.parametrize("runs", ["running_batch", "last_batch", "chunked_req", "result_queue"])
def test_pages_are_put_in_order_when_nothing_runs_whatever_waits(runs: str) -> None:
    guard = make_guard()
    scheduler, batch_at_work = guard.scheduler, SimpleNamespace(is_empty=lambda: False, batch_is_full=True)
    at_rest = SimpleNamespace(is_empty=lambda: True, batch_is_full=True)
    scheduler.running_batch, scheduler.last_batch, scheduler.result_queue = at_rest, None, []
    before = getattr(scheduler, runs)
    setattr(scheduler, runs, [(batch_at_work, None)] if runs == "result_queue" else batch_at_work)
    guard.incidents.unsettled = True
    guard.next_step()
    assert guard.incidents.unsettled
    setattr(scheduler, runs, before)
    guard.next_step()
    assert not guard.incidents.unsettled and not at_rest.batch_is_full


def test_a_rank_among_others_does_not_evict_for_a_stand_in() -> None:
    """The prefixes would still be there on the others. One alone does, and its cache says so."""
    together, alone = make_guard(ranks=2), make_guard()
    together.allocator.free_pages = alone.allocator.free_pages = torch.tensor([], dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        module = SimpleNamespace(EvictParams=lambda num_tokens: num_tokens)
        patch.setitem(sys.modules, "sglang.srt.mem_cache.base_prefix_cache", module)
        assert together.incidents._lend(1) is None
        with pytest.raises(AssertionError, match="evicted"):
            alone.incidents._lend(1)


def test_an_emptied_pool_has_every_page_once(other_rank: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    guard = make_guard(ranks=2)
    monkeypatch.setattr(hooks, "_GUARD", guard)
    other_rank["cpu"] = torch.tensor([5])
    guard.incidents.unsettled = guard._worked = True
    guard.scheduler.running_batch = SimpleNamespace(is_empty=lambda: False, reqs=[])
    guard.next_step()
    guard.allocator.free_pages = torch.arange(1, PAGES + 1)
    hooks.after_clear(None, guard.allocator)
    guard.idle()
    assert guard.allocator.free_pages.tolist() == list(range(1, PAGES + 1))
    assert guard.counters.quarantined_pages == 0


def test_sweeps_and_metrics_keep_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    guard, never = make_guard(sweep_seconds=10), make_guard(sweep_seconds=0)
    exported: list[int] = []
    monkeypatch.setattr(guard.counters, "export", lambda: exported.append(guard.counters.sweeps))
    for now in (100.5, 100.0 + EXPORT_SECONDS, 109.9, 110.0, 110.1, 120.0):
        clock[0] = now
        guard.next_step()
        never.next_step()
    assert guard.counters.sweeps == 2 and never.counters.sweeps == 0
    assert exported == [0, 0, 2]


def test_other_pools_pages_are_none_of_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model has an allocator of its own."""
    guard = make_guard()
    monkeypatch.setattr(hooks, "_GUARD", guard)
    request(guard, 0, 2)
    other = PagedTokenToKVPoolAllocator(1)
    hooks.before_release_page_ids(other, torch.tensor([1]))
    hooks.after_clear(None, other)
    hooks.around_free(lambda allocator, slots_N: allocator.free(slots_N), other, torch.tensor([1]))
    assert (guard.tags.tag_P[[1, 2]] > 0).all()
    hooks.before_release_page_ids(guard.allocator, torch.tensor([1]), torch.tensor([2]))
    assert (guard.tags.tag_P[[1, 2]] < 0).all()


def test_after_a_violation_who_waits_does_not_find_what_is_cached() -> None:
    """The key of the cache changes for requests without pages, by one word, however often; the user's own stays."""
    guard, other = make_guard(), make_guard()
    assert guard.incidents._suffix != other.incidents._suffix, "a client could name it"
    waiting = [SimpleNamespace(req_pool_idx=None, extra_key=key, to_finish=None) for key in (None, "salt")]
    holding = SimpleNamespace(req_pool_idx=3, extra_key="salt")
    guard.scheduler.waiting_queue = [*waiting, holding]
    for number in (1, 2):
        guard.incidents.start_afresh()
        guard.next_step()
        suffix = f"{guard.incidents._suffix}-{number}"
        assert [req.extra_key for req in (*waiting, holding)] == [suffix, f"salt{suffix}", "salt"]


def fail(guard: Guard, *reqs: Any) -> None:
    """Each loses the page at position 1, and the check sees it."""
    for req in reqs:
        free(guard, int(guard.tags.slots_RS[req.req_pool_idx, 1]))
    guard.before_forward(batch(*reqs))
    guard.read_all()


def running(guard: Guard, row: int) -> Any:
    req = request(guard, row, 3)
    req.finished, req.output_ids, req.to_finish, req.finished_reason = (lambda: False), [5, 6], None, None
    return req


@pytest.fixture
def finish_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(message: str = "", status_code: int | None = None, err_type: str | None = None) -> Any:
        return SimpleNamespace(message=message, status_code=status_code, err_type=err_type)

    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_batch", SimpleNamespace(FINISH_ABORT=reason))


@pytest.mark.usefixtures("finish_abort")
def test_an_abort_after_a_violation_does_not_take_its_place() -> None:
    """SGLang sets the reason anew for a client's abort, a time limit, a grammar; ours withholds what was computed."""
    guard = make_guard()
    req, sound = running(guard, 0), running(guard, 1)
    fail(guard, req)
    req.to_finish = sound.to_finish = theirs = SimpleNamespace(err_type=None)
    guard.before_results(batch(req, sound))
    assert req.to_finish.err_type == "KVPageTagMismatch" and sound.to_finish is theirs
    req.finished_reason, req.finished = theirs, lambda: True  # in the middle of the step: a grammar
    req.output_ids.append(7)
    req.return_logprob = sound.return_logprob = True
    guard.incidents.ended(req)
    for each in (req, sound):
        guard.incidents.withhold(each)
    assert req.finished_reason.status_code == 500 and not req.return_logprob and sound.return_logprob
    assert req.output_ids == [5, 6], "a session would go on from what was withheld"


@pytest.mark.usefixtures("finish_abort")
def test_two_requests_with_one_id_are_two() -> None:
    """Each of several tokenizers knows its own ids only."""
    guard = make_guard()
    one, other = running(guard, 0), running(guard, 1)
    one.rid = other.rid = "same"
    fail(guard, one, other)
    assert guard.counters.violations == 2 and one.to_finish.status_code == other.to_finish.status_code == 500
    guard.incidents.ended(one)
    assert guard.incidents.failed(other) and not guard.incidents.failed(one)


def test_a_salt_that_looks_like_ours_is_the_clients_own() -> None:
    """SGLang appends the adapter's id to the salt: cut off with what follows, all adapters would share one cache."""
    guard = make_guard()
    ours = guard.incidents._suffix
    keys = ["|kvq-kv-tagsL", f"bob{ours}-1L", f"bob{ours}-1"]
    guard.scheduler.waiting_queue = [SimpleNamespace(req_pool_idx=None, extra_key=key, to_finish=None) for key in keys]
    for number in (1, 2):
        guard.incidents.start_afresh()
        guard.next_step()
        assert [req.extra_key for req in guard.scheduler.waiting_queue] == [f"{key}{ours}-{number}" for key in keys]


def test_sglangs_count_of_pages_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the server over the first page in quarantine."""
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    make_guard(mode="log")
    with pytest.raises(RecipeError, match="SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY is 1"):
        make_guard(mode="abort")


@pytest.mark.parametrize("mode", ["log", "abort"])
def test_a_failed_request_leaves_nothing_to_the_cache_and_keeps_what_was_checked(mode: Mode) -> None:
    guard = make_guard(mode=mode)
    req = request(guard, 0, 3)
    req.finished, req.output_ids, req.to_finish, req.skip_radix_cache_insert = (lambda: False), [5, 6], None, False
    free(guard, 2)
    with pytest.MonkeyPatch.context() as patch:
        module = SimpleNamespace(FINISH_ABORT=lambda *reason: reason)
        patch.setitem(sys.modules, "sglang.srt.managers.schedule_batch", module)
        guard.before_forward(batch(req))
        guard.read_all()
    assert guard.counters.violations == 1 and guard.health()["healthy"] is False
    if mode == "log":
        assert req.to_finish is None and not req.skip_radix_cache_insert and guard.counters.aborted == 0
    else:
        message, status, kind = req.to_finish
        assert message.startswith("KV page tag mismatch: page 2 ") and (status, kind) == (500, "KVPageTagMismatch")
        assert req.skip_radix_cache_insert and req.finished_len == 2 and guard.counters.aborted == 1


def test_no_row_is_given_back_or_cached_while_its_verdict_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = make_guard(mode="log")
    for act in ("release", "cache"):
        req = request(guard, 0, 2)
        free(guard, int(guard.tags.slots_RS[0, 1]))
        guard.before_forward(batch(req))
        if act == "release":
            guard.releasing(req)
        else:
            monkeypatch.setattr(hooks, "_GUARD", guard)
            req.cache_protected_len = 0
            hooks.around_cache_unfinished(lambda *_: None, SimpleNamespace(disable=False), req)
        assert not guard._pending
        guard.incidents.ended(req)
    assert guard.counters.violations == 2


def test_the_health_field_leaves_the_metrics_alone() -> None:
    """Metrics of several processes hold open files, which cannot be copied: a server was ended by that once."""
    counters = Counters(checks=3)
    with open(__file__, "rb") as file:
        counters._metrics["checks"] = file
        said = counters.as_json()
    assert said["checks"] == 3 and not [name for name in said if name.startswith("_")]

"""The plugin on SGLang's own allocators, request pool, radix cache, requests and batches. Runs where SGLang imports."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("tests.contract.engine", reason="make contract")
import sglang

from kvq.integrity import compat, hooks, plugin
from kvq.integrity.table import Violation

if sglang.__version__ not in compat.SUPPORTED_VERSIONS:
    pytest.skip(f"SGLang {sglang.__version__} is refused, see test_refusal", allow_module_level=True)
import sglang.srt.managers.scheduler
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.contract.integrity.rig import PAGES, Rig, start_engine, unhook

POOLS = [("mha", 1), ("mla", 1), ("mla", 64), ("dsa", 64)]


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    """As in the scheduler's process: its module is imported, then plugins are loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVQ_KV_TAGS", "abort")
        plugin.install()
    start_engine()
    yield
    unhook()


def prompt(rig: Rig, pages: float, first: int = 0) -> list[int]:
    """Tokens for this many pages of a rig, at least 5; different `first`, different prompt."""
    return [first, *(1 + at % 900 for at in range(max(4, int(pages * rig.page_size) - 1)))]


def test_this_sglang_has_every_name_that_is_hooked() -> None:
    assert compat.problems(sglang.__version__) == []
    assert set(hooks.HOOKS) == set(compat.HOOKED)


@pytest.mark.parametrize(("kind", "page_size"), POOLS)
@pytest.mark.parametrize("radix", [True, False])
def test_a_mixed_load_raises_no_alarm(kind: str, page_size: int, radix: bool) -> None:
    """Shared prefixes, chunked prefill, retraction, aborts, eviction under pressure; then every page is back."""
    rig, dice = Rig(kind, page_size, radix=radix), random.Random(3)
    for wave in range(10):
        pages = [dice.choice([4, 9, 12.5]) for _ in range(4)]
        reqs = [
            rig.request([*prompt(rig, count, first=dice.randrange(3)), wave], dice.randint(1, 9)) for count in pages
        ]
        serve(rig, reqs, retract=wave % 2 == 0, abort=wave % 3 == 0)
        serve(rig, list(rig.waiting_queue), retract=False, abort=False)
        rig.accounts()
    assert rig.guard.counters.checks > 100
    assert (rig.guard.counters.violations, rig.guard.counters.double_frees) == (0, 0)


def serve(rig: Rig, reqs: list[Any], *, retract: bool, abort: bool) -> None:
    """To the end, in chunks of three pages; on the way one request is retracted and one aborted by its client."""
    live = list(reqs)
    before = rig.prefill(reqs, chunk=3 * rig.page_size) if reqs else None
    step = 0
    while before is not None:
        step += 1
        if rig.chunked_req is not None:
            chunked = rig.chunked_req
            rig.stash(chunked)
            now = rig.prefill([chunked], chunk=3 * rig.page_size)
        else:
            now = rig.decode(live)
        rig.results(before)
        running = [req for req in live if req.output_ids and not req.finished()]
        if step == 6 and abort and running:
            running[-1].to_finish = FINISH_ABORT("the client went away")
        if step == 7 and retract and running:
            rig.retract(running[0])
            live.remove(running[0])
        before = now
    rig.running_batch = None


def started(kind: str, page_size: int, count: int = 3, **options: Any) -> tuple[Rig, list[Any], Any]:
    """Requests with prompts of their own in the middle of decoding, one step under way."""
    rig = Rig(kind, page_size, **options)
    reqs = [rig.request(prompt(rig, 6.5, first=900 + at), 6) for at in range(count)]
    before = rig.prefill(reqs)
    now = rig.decode(reqs)
    rig.results(before)
    return rig, reqs, now


def go_on(rig: Rig, reqs: list[Any], now: Any) -> None:
    while now is not None:
        following = rig.decode(reqs)
        rig.results(now)
        now = following
    rig.running_batch = None


def assert_ended(req: Any, rig: Rig, tokens: int) -> None:
    reason = req.finished_reason.to_json()
    assert (reason["type"], reason["status_code"], reason["err_type"]) == ("abort", 500, "KVPageTagMismatch")
    assert "expected tag" in reason["message"]
    told = [*req.origin_input_ids, *req.output_ids]
    assert rig.matched(told, req.extra_key) <= len(req.origin_input_ids)  # what it made since is not cached
    assert len(rig.streamed(req)) <= tokens


@pytest.mark.parametrize(("kind", "page_size"), POOLS)
@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_page_freed_in_use_ends_its_request_only(kind: str, page_size: int, radix: bool, at: int) -> None:
    rig, reqs, now = started(kind, page_size, radix=radix)
    page = rig.page(reqs[1], at)
    rig.free_page(page)
    newcomer = rig.request(prompt(rig, 3, first=950), 3)
    rig.results(now)
    before = rig.prefill([newcomer])  # takes the page
    go_on(rig, [*reqs, newcomer], rig.decode(reqs))
    rig.results(before)
    go_on(rig, [newcomer], rig.decode([newcomer]))
    assert_ended(reqs[1], rig, tokens=2)
    assert f"page {page} " in reqs[1].finished_reason.message
    assert [rig.streamed(req) for req in (reqs[0], reqs[2])] == [[7] * 6] * 2
    assert rig.streamed(newcomer) == [7] * 3 and rig.guard.counters.violations == 1
    assert rig.guard.counters.double_frees == 0  # it gave back what was its own
    rig.accounts()


@pytest.mark.parametrize(("kind", "page_size"), POOLS)
@pytest.mark.parametrize("at", [1, 6])
def test_an_overwritten_entry_ends_its_request_and_frees_the_right_page(kind: str, page_size: int, at: int) -> None:
    rig, reqs, now = started(kind, page_size)
    rig.guard.tags._set_page(reqs[0].req_pool_idx, at, rig.page(reqs[1], 2))
    go_on(rig, reqs, now)
    assert_ended(reqs[0], rig, tokens=2)
    assert [rig.streamed(req) for req in reqs[1:]] == [[7] * 6] * 2
    assert rig.guard.counters.double_frees == 0
    rig.accounts()


@pytest.mark.parametrize(("kind", "page_size"), POOLS)
@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE", "NGRAM"])
def test_who_is_given_a_page_in_use_ends_and_writes_nothing(kind: str, page_size: int, algorithm: str) -> None:
    rig, reqs, now = started(kind, page_size)
    rig.algorithm = SpeculativeAlgorithm[algorithm]  # of the newcomer's prefill
    held = rig.page(reqs[0], 3)
    rig.allocator.free_pages = rig.allocator.free_pages.new_tensor([held, *rig.allocator.free_pages.tolist()])
    newcomer = rig.request(prompt(rig, 3, first=950), 3)
    batch = rig.prefill([newcomer])
    assert not batch.out_cache_loc.any()
    rig.algorithm = SpeculativeAlgorithm.NONE
    rig.results(now)
    rig.results(batch)
    go_on(rig, reqs, rig.decode(reqs))
    assert_ended(newcomer, rig, tokens=0)
    assert [rig.streamed(req) for req in reqs] == [[7] * 6] * 3
    rig.accounts()


@pytest.mark.parametrize(("kind", "page_size"), POOLS)
def test_who_holds_a_page_goes_on_though_the_cache_may_not_lend_it(kind: str, page_size: int) -> None:
    """Another entry of the cache names a page when its holder hands it over: disputed, and nobody else may read it."""
    rig = Rig(kind, page_size)
    told = prompt(rig, 6, first=990)
    req = rig.request(told, 6)
    before = rig.prefill([req])
    page = rig.page(req, 2)
    rig.guard.tags.named_P[page] += 1
    now = rig.decode([req])
    rig.results(before)
    go_on(rig, [req], now)
    assert rig.streamed(req) == [7] * 6 and rig.guard.counters.violations == 0
    other = rig.request([*told, 5], 3)
    rig.results(rig.prefill([other]))
    assert_ended(other, rig, tokens=0)
    assert f"page {page} " in other.finished_reason.message


@pytest.mark.parametrize(("kind", "page_size"), POOLS)
def test_a_page_that_the_cache_lost_reaches_no_request(kind: str, page_size: int) -> None:
    """It belongs to a prefix that two requests share, and that a third asks for after its next holder cached it."""
    rig = Rig(kind, page_size)
    shared = prompt(rig, 6, first=990)
    rig.run([rig.request(shared, 2)])
    reqs = [rig.request([*shared, 1 + at], 6) for at in range(2)]
    now = rig.prefill(reqs)
    at = 2
    assert rig.page(reqs[0], at) == rig.page(reqs[1], at)
    rig.free_page(rig.page(reqs[0], at))
    rig.results(now)
    rig.run([rig.request(prompt(rig, 3, first=950), 2)])
    third = rig.request([*shared, 5], 3)
    alone = rig.prefill([third])
    go_on(rig, reqs, rig.decode(reqs))
    rig.results(alone)
    go_on(rig, [third], rig.decode([third]))
    for req in reqs:
        assert_ended(req, rig, tokens=1)
    # Found before it was admitted: then it computes its prefix anew. Or it was given the page: then it ends.
    assert rig.streamed(third) == [7] * 3 or rig.streamed(third) == []
    rig.accounts()
    fourth = rig.request([*shared, 5], 3)
    rig.run([fourth])
    assert rig.streamed(fourth) == [7] * 3
    rig.accounts()


@pytest.mark.parametrize(("kind", "page_size"), POOLS)
def test_a_fault_in_a_chunked_prefill_ends_it_at_its_next_chunk(kind: str, page_size: int) -> None:
    rig = Rig(kind, page_size)
    req = rig.request(prompt(rig, 9.5, first=3), 3)
    before = rig.prefill([req], chunk=4 * page_size)
    rig.results(before)
    rig.stash(req)
    rig.free_page(rig.page(req, 1))
    batch = rig.prefill([req], chunk=4 * page_size)
    assert not batch.out_cache_loc.any()
    rig.results(batch)
    assert rig._pending_chunked_abort_req is req and rig.guard.incidents.failed(req)
    hooks.before_chunked_abort(rig)
    assert rig.sent[0].finished_reason["status_code"] == 500
    rig.abort_chunked(req)
    rig.accounts()


def test_log_reports_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="kvq.integrity")
    rig, reqs, now = started("mla", 64, mode="log")
    before = rig.rows.req_to_token.clone()
    rig.free_page(rig.page(reqs[1], 0))
    now_after = rig.decode(reqs)
    assert (before[:, :400] == rig.rows.req_to_token[:, :400]).all() and now_after.out_cache_loc.all()
    rig.results(now)
    rig.results(now_after)
    assert rig.guard.counters.violations == 1 and not any(req.finished() for req in reqs)
    assert f"for request {reqs[1].rid}" in caplog.text and rig.guard.health()["healthy"] is False


def test_a_sweep_finds_what_the_cache_lost_before_anyone_asks_for_it() -> None:
    rig = Rig("mla", 64)
    tokens = prompt(rig, 5, first=1)
    rig.run([rig.request(tokens, 2)])
    assert rig.matched(tokens) == 5 * 64
    rig.guard._sweep()
    rig.guard._sweep()
    assert rig.guard.counters.sweep_violations == 0
    rig.free_page(int(next(rig.guard.incidents._nodes()).value[64]) // 64)
    rig.guard._sweep()
    rig.guard._sweep()
    assert rig.guard.counters.sweep_violations == 1
    req = rig.request(tokens, 2)
    rig.run([req])
    assert req.cached_tokens == 0 and rig.streamed(req) == [7, 7]
    rig.running_batch = None
    rig.accounts()


@pytest.mark.parametrize(("kind", "page_size"), POOLS)
def test_a_second_copy_in_the_free_list_is_gone_when_all_is_idle(kind: str, page_size: int) -> None:
    rig, reqs, now = started(kind, page_size)
    copy = rig.page(reqs[0], 6)  # at the end of the list: nobody gets it before its holder has freed it
    rig.allocator.free_pages = rig.allocator.free_pages.new_tensor([*rig.allocator.free_pages.tolist(), copy])
    go_on(rig, reqs, now)
    assert [rig.streamed(req) for req in reqs] == [[7] * 6] * 3
    rig.accounts()


def test_an_emptied_cache_starts_again() -> None:
    rig = Rig("mha", 1)
    rig.run([rig.request(prompt(rig, 20), 2)])
    rig.cache.reset()
    rig.rows.clear()
    rig.allocator.clear()
    rig.run([rig.request(prompt(rig, 20), 2)])
    assert rig.guard.counters.violations == 0 and len(rig.allocator.free_pages) < PAGES


def test_the_health_field_says_what_was_found() -> None:
    from types import SimpleNamespace

    rig = Rig("mha", 1)
    state = SimpleNamespace(internal_state={})
    field = hooks.after_internal_state(state, rig, None).internal_state["kvq_kv_tags"]
    assert field["mode"] == "abort" and field["healthy"] is True and field["checks"] == 0


@pytest.mark.parametrize(("kind", "page_size"), POOLS)
def test_a_violation_that_is_read_while_a_step_is_planned(kind: str, page_size: int) -> None:
    """Priority preemption frees a running request when another has found its prefix already, but waits still: that one
    goes on under the name it found, or the tree would hold its pages twice."""
    rig = Rig(kind, page_size)
    shared = prompt(rig, 6, first=970)
    rig.run([rig.request(shared, 2)])
    low, other = rig.request(prompt(rig, 5, first=971), 8), rig.request(prompt(rig, 5, first=972), 8)
    rig.results(rig.prefill([low, other]))
    now = rig.decode([low, other])
    rig.free_page(rig.page(other, 1))
    later = rig.decode([low, other])
    rig.results(now)
    high = rig.request([*shared, 7, 7, 7], 4)
    high.init_next_round_input(rig.cache)
    rig.cache.inc_lock_ref(high.last_node)
    assert rig.guard.counters.violations == 0
    rig.retract(low)  # reads the verdict about `other`
    assert rig.guard.counters.violations == 1
    late = rig.request(prompt(rig, 2, first=973), 2)
    late.extra_key = high.extra_key  # was waiting before the violation
    rig.waiting_queue.remove(high)
    high.set_extend_range(len(high.prefix_indices), len(high.full_untruncated_fill_ids))
    batch = rig._batch([high])
    batch.prepare_for_extend()
    rig._launch(batch)
    for step in (later, batch):
        rig.results(step)
    rig.running_batch = None
    while (step := rig.decode([high])) is not None:
        rig.results(step)
    rig.running_batch = None
    named = [page for node in rig.guard.incidents._nodes() for page in (node.value[::page_size] // page_size).tolist()]
    assert len(named) == len(set(named)) and not isinstance(high.finished_reason, FINISH_ABORT)
    rig.guard.next_step()
    assert late.extra_key != high.extra_key, "who waits learns before the next step"
    rig.cache.evict(EvictParams(num_tokens=10**6))
    assert len(set(rig.allocator.free_pages.tolist())) == len(rig.allocator.free_pages)


def test_nothing_that_is_told_beside_tokens_leaves_either() -> None:
    """SGLang sends one log-probability at least, with the token that it belongs to."""
    rig = Rig("mla", 1)
    req = rig.request(prompt(rig, 5), 4)
    req.return_logprob = req.stream = True
    req.return_hidden_states = "last"
    batch = rig.prefill([req])
    rig.guard.incidents.violation(req, Violation(0, 1, 2, 3), abort=True)
    rig.results(batch, token=777)
    for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
        setattr(req.logprob, f"{name}_val", [-0.5])
        setattr(req.logprob, f"{name}_idx", [777])
    req.hidden_states = [[0.25]]
    hooks.before_stream_output(None, [req], True, None)
    told = _GenerationStreamAccumulator(
        return_logprob=True, return_hidden_states=True, return_routed_experts=False, return_indexer_topk=False,
        spec_algorithm=SpeculativeAlgorithm.NONE, disaggregation_mode=DisaggregationMode.NULL,
        default_stream_interval=1, default_force_stream_interval=50, get_cached_tokens_details=lambda _: None,
        rust_server_mode=True,
    )  # fmt: skip
    told.accept(req=req)
    assert [list(ids) for ids in told.output_ids] == [[]]
    assert told.output_token_logprobs_idx == [[]] and told.output_token_logprobs_val == [[]]
    assert told.output_hidden_states == [None]

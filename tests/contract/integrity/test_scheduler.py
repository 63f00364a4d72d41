"""The plugin in SGLang's own scheduler: loop, planner, prefix cache, pools. `scheduler_runs` is the long form."""

import random
from typing import Any

import pytest

pytest.importorskip("tests.contract.engine", reason="make contract")
import sglang

from kvq.integrity import compat, guard, hooks

if sglang.__version__ not in compat.SUPPORTED_VERSIONS:
    pytest.skip(f"SGLang {sglang.__version__} is refused, see test_refusal", allow_module_level=True)
import sglang.srt.managers.scheduler  # before the fork: seconds, which no child needs to spend again

from tests.contract.integrity import load, real_scheduler, scheduler_runs
from tests.contract.integrity.scheduler_runs import Run, Setup, run, run_ranks

SETUPS = [
    Setup("mha", 1), Setup("mla", 64), Setup("mla", 64, ("--enable-mixed-chunk",)),
    Setup("mla", 64, ("--schedule-policy", "lpm")),
]  # fmt: skip
FAULTS = "rate=0.04,seed=1,kinds=free+swap+double"


def assert_sound(done: Run, requests: int) -> None:
    """Everything answered, nothing wrong sent, and nothing computed on another's page but for requests that ended."""
    assert len(done.endings) == requests and done.wrong == []
    assert set(done.exposed) <= done.ended
    assert done.count("full") == len(done.answers)


def health(done: Run) -> dict[str, Any]:
    assert done.health is not None
    return done.health


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_mixed_load_raises_no_alarm_and_is_answered_as_the_model_says(setup: Setup) -> None:
    done = run(setup, 300, seed=4, mode="abort")
    assert_sound(done, 300)
    assert len(done.ended) == 0 and health(done)["checks"] > 3000
    assert [health(done)[name] for name in ("violations", "double_frees", "sweep_violations")] == [0, 0, 0]
    counts = done.counts
    assert counts["retractions"] > 10 and counts["chunked"] > 20 and counts["cached_tokens"] > 2000
    assert counts["cut_by_client"] > 5 and counts["idle"] == 2


def test_without_the_plugin_the_answers_are_the_same() -> None:
    without, with_tags = run(SETUPS[1], 150, seed=5), run(SETUPS[1], 150, seed=5, mode="abort")
    assert without.health is None and without.wrong == []
    assert (without.steps, without.answers, without.endings) == (
        with_tags.steps, with_tags.answers, with_tags.endings
    )  # fmt: skip


@pytest.mark.parametrize("setup", [*SETUPS, Setup("mla", 1, ("--disable-radix-cache",))], ids=str)
def test_faults_at_random_times_end_whom_they_touch_and_no_other_answer_changes(setup: Setup) -> None:
    """In the end every page is back, by the scheduler's own count when it is idle."""
    done = run(setup, 300, seed=6, mode="abort", faults=FAULTS)
    assert_sound(done, 300)
    assert len(done.faults) > 20 and 10 < len(done.ended) <= len(done.faults) + 10
    assert health(done)["violations"] >= len(done.ended) and health(done)["healthy"] is False


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_faults_at_any_moment_of_a_step(setup: Setup) -> None:
    """Before planning, between planning and the check, and before results are processed."""
    done = run(setup, 300, seed=7, mode="abort", faults="rate=0.02,seed=2,at=plan+check+results")
    assert_sound(done, 300)
    assert len(done.faults) > 20 and len(done.ended) > 10
    assert {fault["at"] for fault in done.faults} == {"plan", "check", "results"}
    assert all(len(fault["tokens_left"]) == len(fault["affected"]) for fault in done.faults)


def test_a_request_that_needs_the_pages_out_of_use_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a violation one waits for nearly the whole pool, so the engine never becomes idle."""
    dice = random.Random(1)
    prompts = [load._tokens(dice, count) for count in (200, 200, 1930)]
    asked = [load.Asked(f"r{at}", prompt, (60, 60, 20)[at], None) for at, prompt in enumerate(prompts)]
    monkeypatch.setattr(scheduler_runs, "mixed_load", lambda *_: asked)
    receive = load.Client.receive
    done_at: list[int] = []

    def receive_and_harm(client: load.Client, scheduler: Any) -> list[Any]:
        running = {req.rid: req for req in scheduler.running_batch.reqs}
        if not done_at and {"r0", "r1"} <= set(running) and len(running["r0"].output_ids) > 5:
            done_at.append(client.turn)
            tags = hooks._GUARD.tags  # type: ignore[union-attr]
            tags._set_page(running["r0"].req_pool_idx, 3, int(tags._page_range(running["r1"].req_pool_idx, 3, 4)[0]))
        assert client.turn < 700, "nothing moves"
        return receive(client, scheduler)

    monkeypatch.setattr(load.Client, "receive", receive_and_harm)
    done = run(Setup("mla", 64), 3, seed=4, mode="abort")
    assert_sound(done, 3)
    assert done.endings == {"r0": "tags", "r1": "full", "r2": "full"}


@pytest.mark.parametrize("page_size", [1, 64])
def test_one_that_runs_on_into_the_whole_pool_gets_what_a_failed_one_lost(
    monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    """The engine never becomes idle, and nobody waits: the pages are needed by one that is sound and running."""
    setup = Setup("mla", page_size)
    grows, short, lost = (300, 200, range(3)) if page_size == 64 else (100, 60, range(30, 60))
    dice = random.Random(1)
    asked = [
        load.Asked("r0", load._tokens(dice, 200), setup.tokens - 200 - page_size, None),
        load.Asked("r1", load._tokens(dice, 20), grows, None),
    ]
    monkeypatch.setattr(scheduler_runs, "mixed_load", lambda *_: asked)
    monkeypatch.setattr(real_scheduler, "RETRACT_EVERY", 10**9)
    receive = load.Client.receive
    done_at: list[int] = []

    def receive_and_harm(client: load.Client, scheduler: Any) -> list[Any]:
        running = {req.rid: req for req in scheduler.running_batch.reqs}
        if not done_at and {"r0", "r1"} <= set(running) and len(running["r1"].output_ids) > short:
            done_at.append(client.turn)
            tags = hooks._GUARD.tags  # type: ignore[union-attr]
            for at in lost:
                theirs = int(tags._page_range(running["r0"].req_pool_idx, at, at + 1)[0])
                tags._set_page(running["r1"].req_pool_idx, at, theirs)
        return receive(client, scheduler)

    monkeypatch.setattr(load.Client, "receive", receive_and_harm)
    done = run(setup, 2, seed=4, mode="abort")
    assert_sound(done, 2)
    assert done.endings == {"r0": "full", "r1": "tags"}


@pytest.mark.parametrize("flag", ["--disable-overlap-schedule", "--disable-radix-cache"])
def test_a_session_does_not_go_on_from_a_withheld_token(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    from sglang.srt.managers.io_struct import OpenSessionReqInput, SessionParams

    dice = random.Random(1)
    prompts = [load._tokens(dice, count) for count in (70, 70, 5)]
    asked = [load.Asked(f"r{at}", prompt, (30, 200, 5)[at], None) for at, prompt in enumerate(prompts)]
    monkeypatch.setattr(scheduler_runs, "mixed_load", lambda *_: asked)
    monkeypatch.setattr(real_scheduler, "RETRACT_EVERY", 10**9)
    as_sglang, receive = load._as_sglang, load.Client.receive
    held: list[Any] = []
    harmed: list[int] = []

    def in_a_session(one: load.Asked) -> Any:
        found = as_sglang(one)
        if one.rid != "r1":
            found.session_params = SessionParams(id="s", rid=None if one.rid == "r0" else "r0")
        return found

    def receive_and_harm(client: load.Client, scheduler: Any) -> list[Any]:
        new = receive(client, scheduler)
        if client.turn == 1:
            new.insert(0, OpenSessionReqInput(capacity_of_str_len=1000, session_id="s"))
        held.extend(one for one in new if getattr(one, "rid", "") == "r2")
        new = [one for one in new if getattr(one, "rid", "") != "r2"]
        if held and client.load["r0"].reason is not None:
            new.append(held.pop())
        running = {req.rid: req for req in scheduler.running_batch.reqs}
        if not harmed and {"r0", "r1"} <= set(running) and len(running["r0"].output_ids) == 10:
            harmed.append(client.turn)
            tags = hooks._GUARD.tags  # type: ignore[union-attr]
            tags._set_page(running["r0"].req_pool_idx, 0, int(tags._page_range(running["r1"].req_pool_idx, 0, 1)[0]))
        if "r2" in running:
            seen = [*prompts[0], *client.load["r0"].tokens, *prompts[2]]
            assert list(running["r2"].origin_input_ids) == seen, "it goes on from a token that was withheld"
        return new

    monkeypatch.setattr(load, "_as_sglang", in_a_session)
    monkeypatch.setattr(load.Client, "receive", receive_and_harm)
    done = run(Setup("mla", 64, (flag,)), 3, seed=4, mode="abort")
    assert done.endings == {"r0": "tags", "r1": "full", "r2": "full"}


def test_the_row_of_one_that_finished_before_its_violation_was_read_is_not_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page that stands in for a lost one has a sound record: a request with the same prompt would have taken it."""
    prompt = load._tokens(random.Random(1), 74)
    asked = [load.Asked("r0", prompt, 1, None), load.Asked("r1", list(prompt), 30, None)]
    monkeypatch.setattr(scheduler_runs, "mixed_load", lambda *_: asked)
    receive = load.Client.receive
    held: list[Any] = []
    harmed: list[int] = []

    def receive_and_harm(client: load.Client, scheduler: Any) -> list[Any]:
        held.extend(receive(client, scheduler))
        if scheduler.forward_ct == 1 and not harmed and scheduler.last_batch is not None:
            reqs = {req.rid: req for req in scheduler.last_batch.reqs}
            assert set(reqs) == {"r0", "r1"}
            harmed.append(25)  # a page that nobody has; the batch under way is checked already
            hooks._GUARD.tags._set_page(reqs["r0"].req_pool_idx, 0, 25)  # type: ignore[union-attr]
        new, held[:] = (list(held), []) if len(held) != 1 else ([], held)  # both in one batch
        return new

    monkeypatch.setattr(load.Client, "receive", receive_and_harm)
    done = run(Setup("mla", 64, ("--chunked-prefill-size", "512")), 2, seed=4, mode="abort")
    assert (done.wrong, done.exposed, health(done)["violations"]) == ([], [], 1)


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_failed_request_that_is_retracted_before_it_ends_still_ends(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is longer than a chunk: it must not be prefilled for ever."""
    dice = random.Random(1)
    asked = [load.Asked(f"r{at}", load._tokens(dice, (60, 200, 20)[at]), (150, 60, 1)[at], None) for at in range(3)]
    monkeypatch.setattr(scheduler_runs, "mixed_load", lambda *_: asked)
    receive = load.Client.receive
    held: dict[str, Any] = {}
    harmed: list[int] = []

    def receive_and_harm(client: load.Client, scheduler: Any) -> list[Any]:
        new = receive(client, scheduler)
        for one in [one for one in new if getattr(one, "rid", "r0") != "r0"]:
            new.remove(one)
            held[one.rid] = one
        # Batch 39 is the prefill of r2, so the verdict about the decode before it is read in results without r1.
        for rid, step in (("r1", 10), ("r2", 38)):
            if scheduler.forward_ct == step and rid in held:
                new.append(held.pop(rid))
        if scheduler.forward_ct == 39 and not harmed:
            running = {req.rid: req for req in scheduler.running_batch.reqs}
            at = 30 if page_size == 1 else 0
            tags = hooks._GUARD.tags  # type: ignore[union-attr]
            harmed.append(int(tags._page_range(running["r0"].req_pool_idx, at, at + 1)[0]))
            tags._set_page(running["r1"].req_pool_idx, at, harmed[0])
        assert client.turn < 900, "nothing moves"
        return new

    monkeypatch.setattr(load.Client, "receive", receive_and_harm)
    done = run(Setup("mla", page_size), 3, seed=4, mode="abort")
    assert_sound(done, 3)
    assert done.endings == {"r0": "full", "r1": "tags", "r2": "full"}


def test_the_same_faults_send_wrong_tokens_where_they_are_only_reported() -> None:
    """So the faults are real, and the model shows them."""
    done = run(SETUPS[1], 300, seed=6, mode="log", faults=FAULTS)
    assert len(done.wrong) > 20 and len(done.ended) == 0 and health(done)["violations"] > 20


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_fault_on_one_rank_ends_the_request_on_both_in_the_same_step(page_size: int) -> None:
    """Two schedulers of one tensor-parallel group. If they planned one step differently, gloo would end both."""
    faults = "rate=0.04,seed=1,kinds=swap,rank=0"
    first, second = run_ranks(Setup("mla", page_size), 150, seed=2, faults=[faults, faults])
    assert len(first.faults) > 10 and second.faults == []
    assert len(first.ended) > 8
    for done in (first, second):
        assert_sound(done, 150)
    assert (first.steps, first.endings, first.answers) == (second.steps, second.endings, second.answers)
    assert health(first)["last_violation"] == health(second)["last_violation"] != ""


@pytest.mark.parametrize(("page_size", "seed"), [(1, 2), (64, 2), (64, 13)])
def test_faults_at_any_moment_of_a_step_on_one_rank(page_size: int, seed: int) -> None:
    """With 13, that rank has no page left to settle a request with."""
    faults = f"rate=0.06,seed={seed},kinds=swap,rank=0,at=plan+check+results"
    first, second = run_ranks(Setup("mla", page_size), 150, seed=seed, faults=[faults, faults])
    assert len(first.faults) > 10 and second.faults == []
    for done in (first, second):
        assert_sound(done, 150)
    assert (first.steps, first.endings, first.answers) == (second.steps, second.endings, second.answers)


def test_a_prefill_that_one_rank_alone_has_to_settle_is_settled_before_planning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settling takes a page: a rank that did so while it planned had one less, and admitted other requests."""
    dice, before_forward = random.Random(1), guard.Guard.before_forward

    def harm_and_check(self: guard.Guard, batch: Any) -> None:
        req = self.scheduler.chunked_req
        if req in batch.reqs and not self.incidents.failed(req) and dice.random() < 0.5:
            first, end = req.cache_protected_len // 64, -(-req.kv.kv_allocated_len // 64)
            foreign = dice.randrange(1, self.tags.num_pages)
            if first < end and self.scheduler.ps.tp_rank == 0:
                self.tags._set_page(req.req_pool_idx, first, foreign)
        before_forward(self, batch)

    monkeypatch.setattr(guard.Guard, "before_forward", harm_and_check)
    for seed in (1, 2):
        first, second = run_ranks(Setup("mla", 64), 120, seed=seed, faults=["", ""])
        assert len(first.ended) > 3
        for done in (first, second):
            assert_sound(done, 120)
        assert (first.steps, first.endings, first.answers) == (second.steps, second.endings, second.answers)


def test_the_same_faults_on_both_ranks() -> None:
    """A bug in what all ranks compute alike, as most are."""
    first, second = run_ranks(Setup("mha", 64), 150, seed=3, faults=[FAULTS, FAULTS])
    assert_sound(first, 150)
    assert len(first.ended) > 5
    assert (first.steps, first.endings, first.answers) == (second.steps, second.endings, second.answers)

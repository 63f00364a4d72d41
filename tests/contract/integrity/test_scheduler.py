"""The plugin in SGLang's own scheduler: loop, planner, prefix cache, pools. `scheduler_runs` is the long form."""

import random
from typing import Any

import pytest

pytest.importorskip("tests.contract.engine", reason="make contract")
import sglang

from kvq.integrity import compat, hooks

if sglang.__version__ not in compat.SUPPORTED_VERSIONS:
    pytest.skip(f"SGLang {sglang.__version__} is refused, see test_refusal", allow_module_level=True)
import sglang.srt.managers.scheduler  # before the fork: seconds, which no child needs to spend again

from tests.contract.integrity import load, scheduler_runs
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


def test_the_same_faults_on_both_ranks() -> None:
    """A bug in what all ranks compute alike, as most are."""
    first, second = run_ranks(Setup("mha", 64), 150, seed=3, faults=[FAULTS, FAULTS])
    assert_sound(first, 150)
    assert len(first.ended) > 5
    assert (first.steps, first.endings, first.answers) == (second.steps, second.endings, second.answers)

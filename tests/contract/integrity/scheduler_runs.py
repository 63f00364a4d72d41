"""Runs of SGLang's scheduler with and without page tags; `python -m tests.contract.integrity.scheduler_runs` is long.

    python -m tests.contract.integrity.scheduler_runs alarms [--requests 10000]
    python -m tests.contract.integrity.scheduler_runs faults [--requests 3000] [--rate 0.03] [--seeds 1]
    python -m tests.contract.integrity.scheduler_runs ranks [--requests 150] [--rate 0.03] [--seeds 1]

alarms   one load without and with the plugin: no violation, and the same tokens for every request.
faults   the same kind of load with faults at random times, three times: in mode `log`, where the wrong tokens leave (so
         the faults are real and the model shows them), then in mode `abort`.
ranks    two tensor-parallel ranks with the same load: faults on one, then on both. Both must do the same in each step.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.contract.engine import in_child
from tests.contract.integrity import real_scheduler
from tests.contract.integrity.load import Client, mixed_load
from tests.contract.integrity.real_scheduler import Place

ROWS = 24
CHUNK = 128
INJECTED = "KV page fault injected "
LOAD_FLAGS = ["--chunked-prefill-size", str(CHUNK), "--schedule-conservativeness", "0.01", "--log-level", "critical"]


@dataclass(frozen=True)
class Setup:
    kind: str
    page_size: int
    flags: tuple[str, ...] = ()
    twins: float = 0.0  # how many requests have the prompt of one before them

    def __str__(self) -> str:
        twins = [f"{self.twins:.0%} twins"] if self.twins else []
        return " ".join([f"{self.kind}, page size {self.page_size}", *self.flags, *twins])

    @property
    def tokens(self) -> int:
        """So few that requests are retracted."""
        return 800 if self.page_size == 1 else 64 * 32


SETUPS = [
    Setup("mha", 1), Setup("mla", 1), Setup("mha", 64), Setup("mla", 64), Setup("dsa", 64),
    Setup("mla", 1, ("--disable-radix-cache",)), Setup("mla", 64, ("--enable-mixed-chunk",)),
    Setup("mha", 64, ("--disable-overlap-schedule",)),
]  # fmt: skip


@dataclass
class Run:
    """What a load was answered, and what the plugin says of it."""

    setup: str
    seconds: float
    steps: int
    answers: dict[str, list[int]]  # of requests that were answered in full
    endings: dict[str, str]
    wrong: list[str]  # requests that were sent a token which they should not have been
    exposed: list[str]  # requests for which the model computed such a token
    counts: dict[str, int]  # of the load
    health: dict[str, Any] | None
    faults: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ended(self) -> set[str]:
        """By the plugin."""
        return {rid for rid, ending in self.endings.items() if ending == "tags"}

    def count(self, ending: str) -> int:
        return list(self.endings.values()).count(ending)


class _Heard(logging.Handler):
    """The faults that were injected, as the plugin logs them."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(INJECTED):
            self.faults.append(json.loads(record.getMessage().removeprefix(INJECTED)))


def run(setup: Setup, requests: int, seed: int, *, mode: str = "off", faults: str = "") -> Run:
    """One scheduler in a process of its own, from its start until every request is answered and all pages are back."""
    return Run(**in_child(lambda: _run(setup, requests, seed, mode, faults, Place())))


def run_ranks(setup: Setup, requests: int, seed: int, *, faults: list[str]) -> list[Run]:
    """As many tensor-parallel ranks as there are fault settings, with the same load; each has its own faults."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(faults)) as pool:
        places = [Place(rank, len(faults), Path(folder) / "meeting") for rank in range(len(faults))]
        started = [
            pool.submit(in_child, partial(_run, setup, requests, seed, "abort", spec, place))
            for spec, place in zip(faults, places, strict=True)
        ]
        return [Run(**future.result()) for future in started]


def _run(setup: Setup, requests: int, seed: int, mode: str, faults: str, place: Place) -> dict[str, Any]:
    heard = _Heard()
    logging.disable(logging.NOTSET)
    ours = logging.getLogger("kvq.integrity")
    ours.propagate = False  # thousands of lines
    ours.setLevel(logging.WARNING)
    ours.addHandler(heard)
    os.environ.update(KVQ_KV_TAGS=mode, KVQ_KV_TAGS_FAULTS=faults, KVQ_KV_TAGS_SWEEP_SECONDS="0.5")
    # With nothing but reports, faults make the pages' count wrong; that shall not end the run before its tokens are
    # seen.
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = str(int(mode != "log"))
    _load_plugins(mode)
    load = mixed_load(seed, requests, setup.page_size, setup.twins)
    client = Client(load)
    pool = (setup.kind, setup.page_size, setup.tokens)
    scheduler = real_scheduler.start(client, pool, ROWS, [*LOAD_FLAGS, *setup.flags], place)
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    exposed = real_scheduler.watch(scheduler, client)
    started = time.perf_counter()
    scheduler.run_event_loop()
    state = scheduler.get_internal_state(None).internal_state
    counts = Counter(
        requests=len(load), retractions=sum(asked.retractions for asked in load), flushes=client.flushes,
        cached_tokens=sum(asked.cached for asked in load), chunked=sum(len(asked.prompt) > CHUNK for asked in load),
        cut_by_client=sum(asked.ending == "cut" for asked in load), idle=client.bursts,
    )  # fmt: skip
    return asdict(
        Run(
            str(setup), time.perf_counter() - started, scheduler.forward_ct,
            {asked.rid: asked.tokens for asked in load if asked.ending == "full"},
            {asked.rid: asked.ending for asked in load}, [asked.rid for asked in load if asked.wrong], sorted(exposed),
            dict(counts), state.get("kvq_kv_tags"), heard.faults,
        )
    )  # fmt: skip


def _load_plugins(mode: str) -> None:
    """SGLang's own loader, which finds kvq by its entry point."""
    os.environ["SGLANG_PLUGINS"] = "kvq_kv_tags"
    import sglang.srt.managers.scheduler
    from sglang.srt import plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert sglang.srt.managers.scheduler and not HookRegistry._patched, "hooks of another test"
    plugins._plugins_loaded = False
    plugins.load_plugins()
    assert bool(HookRegistry._patched) == (mode != "off"), "is kvq installed beside this SGLang?"


def alarms(arguments: argparse.Namespace) -> None:
    say(
        "| pool | requests | steps | retractions | longer than a chunk | tokens from the cache | cut by clients "
        "| pages counted when idle | checks | violations | sweeps | other tokens than without |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for setup in arguments.setups:
        without = run(setup, arguments.requests, seed=1)
        with_tags = run(setup, arguments.requests, seed=1, mode="abort")
        both = without.answers.keys() & with_tags.answers.keys()
        other = sum(without.answers[rid] != with_tags.answers[rid] for rid in both)
        counts, health = with_tags.counts, with_tags.health or {}
        violations = health["violations"] + health["double_frees"] + health["sweep_violations"]
        say(
            f"| {setup} | {counts['requests']} | {with_tags.steps} | {counts['retractions']} | {counts['chunked']} "
            f"| {counts['cached_tokens']} | {counts['cut_by_client']} | {counts['idle']} | {health['checks']} "
            f"| {violations} | {health['sweeps']} | {other}/{len(both)} |"
        )
        if violations or other or without.wrong or with_tags.wrong or with_tags.ended:
            raise SystemExit(f"{setup}: {violations} violations, {other} other answers, wrong {with_tags.wrong[:5]}")


def faults(arguments: argparse.Namespace) -> None:
    say(
        "| pool | requests | faults: free, swap, double | with `log`: requests that were sent wrong tokens "
        "| with `abort`: would have been | ended before | sent wrong tokens | detected "
        "| finished in full, of these other tokens | cut by clients "
        "| referred to a faulty page and finished: tokens still to be given |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for setup in arguments.setups:
        for seed in range(1, arguments.seeds + 1):
            spec = f"rate={arguments.rate},seed={seed},kinds=free+swap+double,at={arguments.at}"
            try:
                logged = str(len(run(setup, arguments.requests, seed, mode="log", faults=spec).wrong))
            except AssertionError as error:
                logged = f"the engine ended: {str(error).strip().splitlines()[-1][:80]}"
            done = run(setup, arguments.requests, seed, mode="abort", faults=spec)
            kinds = Counter(fault["kind"] for fault in done.faults)
            missed = set(done.wrong) | set(done.exposed) - done.ended
            needed = len(done.ended) + len(missed)
            finished = [
                str(left)
                for fault in done.faults
                for rid, left in zip(fault["affected"], fault["tokens_left"], strict=True)
                if done.endings[rid] == "full"
            ]
            say(
                f"| {setup} | {len(done.endings)} | {kinds['free']}, {kinds['swap']}, {kinds['double']} | {logged} "
                f"| {needed} | {len(done.ended)} | {len(done.wrong)} | {1 - len(missed) / max(1, needed):.2%} "
                f"| {len(done.answers)}, {sum(rid in done.wrong for rid in done.answers)} | {done.count('cut')} "
                f"| {', '.join(finished) or '-'} |"
            )
            if missed:
                raise SystemExit(f"{setup}: {sorted(missed)[:5]} were not ended in time; {done.health}")


def ranks(arguments: argparse.Namespace) -> None:
    say(
        "| pool | requests a run | runs | faults on | faults | ended on both in the same steps |\n"
        "|---|---|---|---|---|---|"
    )
    for setup in arguments.setups:
        for place, kinds in (("rank 0", "swap,rank=0"), ("both alike", "free+swap+double")):
            injected = ended = 0
            for seed in range(1, arguments.seeds + 1):
                spec = f"rate={arguments.rate},seed={seed},kinds={kinds},at={arguments.at}"
                first, second = run_ranks(setup, arguments.requests, seed, faults=[spec, spec])
                alike = (first.steps, first.endings, first.answers) == (second.steps, second.endings, second.answers)
                missed = [rid for done in (first, second) for rid in set(done.exposed) - done.ended]
                missed += [*first.wrong, *second.wrong]
                if not alike or missed:
                    raise SystemExit(f"{setup}, {spec}: alike {alike}, not ended in time {missed[:5]}")
                injected, ended = injected + len(first.faults), ended + len(first.ended)
            say(f"| {setup} | {arguments.requests} | {arguments.seeds} | {place} | {injected} | {ended} |")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["alarms", "faults", "ranks"])
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float, default=0.03, help="faults per turn of the scheduler")
    parser.add_argument("--at", default="plan", help="moments of a turn, such as plan+check+results; each has the rate")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--twins", type=float, default=0.0, help="how many requests have the prompt of one before them")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of setups, from 0")
    arguments = parser.parse_args()
    setups = SETUPS if arguments.only is None else [SETUPS[at] for at in arguments.only]
    arguments.setups = [replace(setup, twins=arguments.twins) for setup in setups]
    arguments.requests = arguments.requests or {"alarms": 10000, "ranks": 150}.get(arguments.command, 3000)
    {"alarms": alarms, "faults": faults, "ranks": ranks}[arguments.command](arguments)


if __name__ == "__main__":
    main()

"""kill -9 at random points, again and again, and compare bytes: `python -m tests.faults.soak --points 120 --seed 1`.

A chain kills a run, then the run that goes on, and so on until one comes to its end: its output must have the bytes of
a run that nobody disturbed. Half of the points are calls (the n-th read, write, fsync, rename, ...), a write being cut
in half; the others are moments, most of them within a stage of the run.
"""

import time
from collections import Counter
from pathlib import Path
from random import Random

from tests.faults.processes import KINDS, MODELS, Bench, Ended, Fault, chances, die_in, run_program

SIGKILLED = -9


def where_killed(bench: Bench, ended: Ended) -> str:
    """A word for the point, from the shim's log and from what the run last told."""
    call = ended.log.rpartition("killed at call ")[2]
    if call:
        kind, _, path = call.partition(" ")
        name = next(name for name, bit in KINDS.items() if bit == int(kind))
        if path.startswith(str(bench.source)):
            return f"{name} of the source"
        if ".kvq-journal" in path or ".partial.journal" in path:
            return f"{name} in the journal"
        return f"{name} in the output"
    stage = ended.stage.split(" ", 2)[-1]
    return f"moment: {stage or 'start'}"


class Soak:
    """Chains of kills of one kind of run."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        started = time.monotonic()
        first = bench.run()
        assert first.code == 0, first.words
        self.seconds = time.monotonic() - started
        self.calls = first.calls
        self.stages = first.stages
        assert bench.remove_output() == bench.straight
        self.killed: Counter[str] = Counter()
        self.resumed = 0

    def chain(self, draw: Random, most: int) -> None:
        """At most so many kills, then a run to the end; raises AssertionError with the story if a byte differs."""
        story: list[str] = []
        for _ in range(most):
            ended = self._killed_run(draw)
            story.append(where_killed(self.bench, ended) if ended.code == SIGKILLED else f"ended {ended.code}")
            problem = self.bench.problem()
            assert not problem, (problem, story)
            assert ended.code in (0, SIGKILLED), (ended.code, ended.words, story)
            if ended.code == SIGKILLED:
                self.killed[story[-1]] += 1
            if self.bench.out.exists():
                break
        self._finish(story)

    def _killed_run(self, draw: Random) -> Ended:
        choice = draw.random()
        if choice < 0.1:
            return self.bench.run(kill_after=draw.uniform(0, self.seconds))
        if choice < 0.5:
            stage, seconds = draw.randrange(self.stages), draw.uniform(0, self.seconds / self.stages)
            return self.bench.run(at_stage=lambda number: die_in(seconds) if number == stage else None)
        kind = draw.choice([bit for bit in KINDS.values() if self.calls[bit]])
        return self.bench.run(Fault(kind, draw.randint(1, self.calls[kind])))

    def _finish(self, story: list[str]) -> None:
        whole = self.bench.out.exists()
        ended = self.bench.run()
        # Once the output has its name the same command has nothing to do, and says so; it clears what was left.
        assert ended.code == (7 if whole else 0), (ended.code, ended.words, story)
        assert self.bench.remove_output() == self.bench.straight, story
        assert self.bench.left_over() == [], (self.bench.left_over(), story)
        self.resumed += 1


def soak(scratch: Path, points: int, seed: int) -> dict[str, object]:
    """Kill at so many points, over all kinds of runs in turn."""
    soaks = []
    for number, (name, model) in enumerate(MODELS.items()):
        folder = scratch / str(number)
        folder.mkdir(parents=True)
        soaks.append((name, Soak(Bench(folder, model))))
    started = time.monotonic()
    for number, draw in enumerate(chances(seed)):
        total = sum(sum(one.killed.values()) for _, one in soaks)
        if total >= points:
            break
        soaks[number % len(soaks)][1].chain(draw, min(draw.randint(2, 10), points - total))
    killed = sum((one.killed for _, one in soaks), Counter[str]())
    return {
        "seed": seed,
        "points": sum(killed.values()),
        "chains compared": sum(one.resumed for _, one in soaks),
        "by kind of run": {name: sum(one.killed.values()) for name, one in soaks},
        "by place": dict(killed.most_common()),
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    run_program(__doc__, soak, "--points", 120)

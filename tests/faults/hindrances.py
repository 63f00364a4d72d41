"""Disks that fill up, fail or turn read-only, sources that change, clocks that jump: `python -m tests.faults.hindrances
--trials 60 --seed 1`. A hindered run ends with one sentence and nothing that looks finished; after repair the same
command gives the bytes of a run that nobody disturbed.
"""

import errno
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.faults.processes import (
    KINDS,
    MAKE,
    MODELS,
    OPEN,
    READ,
    REMOVE,
    RENAME,
    SYNC,
    WRITE,
    Bench,
    Ended,
    Fault,
    chances,
    run_program,
)

Hindered = Callable[["Trials", Random], Ended]
SOURCE_OR_OUTPUT = (3, 7)


class Trials:
    """Hindered runs of one kind, each followed by an undisturbed one."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.straight = bench.straight
        first = bench.run(where=bench.source)
        self.source_calls, self.stages = first.calls, first.stages
        bench.remove_output()
        self.output_calls = bench.run(where=bench.out.parent).calls
        bench.remove_output()

    def trial(self, hinder: Hindered, draw: Random) -> int:
        """The exit code of the hindered run; raises AssertionError when it or the repair is not as it should be."""
        ended = hinder(self, draw)
        told = (hinder.__name__, ended)
        if ended.code != 0:
            assert ended.code in SOURCE_OR_OUTPUT, told
            assert ended.words.startswith("kvq: ") and ended.words.count("\n") == 1, told
            assert "Traceback" not in ended.words and str(self.bench.folder) in ended.words, told
            assert not self.bench.out.exists() or self.bench.contents() == self.straight, told
        if not self.bench.out.exists():
            again = self.bench.run()
            assert again.code == 0, (again, told)
        assert self.bench.remove_output() == self.straight, told
        assert self.bench.left_over() in ([], ["out.partial.journal"]), (self.bench.left_over(), told)
        subprocess.run(["rm", "-rf", self.bench.parked], check=True)
        return ended.code


def full_disk(trials: Trials, draw: Random) -> Ended:
    """ENOSPC from the n-th write on."""
    at = draw.randint(1, trials.output_calls[WRITE])
    return trials.bench.run(Fault(WRITE, at, errno.ENOSPC), where=trials.bench.out.parent)


def broken_output(trials: Trials, draw: Random) -> Ended:
    """EIO or EDQUOT at one write, fsync, rename, or at making or removing a file."""
    kind = draw.choice([kind for kind in (WRITE, SYNC, RENAME, MAKE, REMOVE) if trials.output_calls[kind]])
    number = draw.choice((errno.EIO, errno.EDQUOT))
    return trials.bench.run(
        Fault(kind, draw.randint(1, trials.output_calls[kind]), number, times=1), where=trials.bench.out.parent
    )


def read_only_output(trials: Trials, draw: Random) -> Ended:
    """EROFS for everything from some moment on, often from the start."""
    kinds = WRITE | RENAME | MAKE | REMOVE
    calls = sum(trials.output_calls[kind] for kind in KINDS.values() if kind & kinds)
    at = draw.choice((1, draw.randint(1, calls)))
    return trials.bench.run(Fault(kinds, at, errno.EROFS), where=trials.bench.out.parent)


def broken_source(trials: Trials, draw: Random) -> Ended:
    """EIO at a read of the source, or EACCES when a file of it is opened, and at all later ones."""
    kind, number = draw.choice(((READ, errno.EIO), (READ, errno.EIO), (OPEN, errno.EACCES)))
    return trials.bench.run(Fault(kind, draw.randint(1, trials.source_calls[kind]), number), where=trials.bench.source)


def changing_source(trials: Trials, draw: Random) -> Ended:
    """A shard that is rewritten, cut or removed during the run, and then put back."""
    shard = draw.choice(sorted(trials.bench.source.glob("*.safetensors")))
    data = shard.read_bytes()
    place = draw.randrange(len(data) // 2, len(data))
    changed = draw.choice((data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], data[:place], None))
    when = draw.randrange(trials.stages)

    def change(number: int) -> None:
        if number == when and changed is None:
            shard.unlink()
        elif number == when and changed is not None:
            shard.write_bytes(changed)

    try:
        return trials.bench.run(at_stage=change)
    finally:
        shard.write_bytes(data)


def jumping_clock(trials: Trials, draw: Random) -> Ended:
    """A clock that jumps by years at each look, and files of an interrupted run from 1970 or 2100."""
    trials.bench.run(Fault(SYNC, draw.randint(1, trials.output_calls[SYNC])), where=trials.bench.out.parent)
    for path in trials.bench.out.parent.rglob("*"):
        os.utime(path, (draw.choice((0, 4102444800)),) * 2)
    if trials.bench.out.exists():
        trials.bench.remove_output()
    return trials.bench.run(clock=draw.getrandbits(60) | 1)


def full_tmpfs(trials: Trials, draw: Random) -> Ended:
    """A real file system that something else fills during the run. Needs the right to mount."""
    place, when = trials.bench.out.parent, draw.randrange(trials.stages)
    free = draw.randrange(400_000)

    def fill(number: int) -> None:
        if number == when:
            status = os.statvfs(place)
            with (place / "ballast").open("wb") as file:
                file.truncate(0)
                os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - free))

    with _small_disk(place):
        ended = trials.bench.run(at_stage=fill)
        (place / "ballast").unlink(missing_ok=True)
        if ended.code != 0:
            assert not trials.bench.out.exists(), ended
            again = trials.bench.run()
            assert again.code == 0, (again, ended)
        assert trials.bench.remove_output() == trials.straight, ended
    return ended


@contextmanager
def _small_disk(place: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


ALL: tuple[Hindered, ...] = (
    full_disk, broken_output, read_only_output, broken_source, changing_source, jumping_clock,
)  # fmt: skip


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a small disk."""
    folder.mkdir(exist_ok=True)
    tried = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
    if tried.returncode == 0:
        subprocess.run(["umount", folder], check=True)
    return tried.returncode == 0


def run_trials(scratch: Path, number: int, seed: int) -> dict[str, object]:
    """So many trials of all kinds in turn, over two kinds of runs."""
    trials = []
    for name in ("dsa with MTP, gptq", "pass-through"):
        folder = scratch / name.split()[0]
        folder.mkdir(parents=True)
        trials.append(Trials(Bench(folder, MODELS[name])))
    kinds = (*ALL, full_tmpfs) if can_mount(scratch / "mount") else ALL
    started = time.monotonic()
    codes: dict[str, Counter[int]] = {kind.__name__: Counter() for kind in kinds}
    for trial, draw in zip(range(number), chances(seed), strict=False):
        hinder = kinds[trial % len(kinds)]
        codes[hinder.__name__][trials[trial // len(kinds) % len(trials)].trial(hinder, draw)] += 1
    return {
        "seed": seed,
        "trials": number,
        "exit codes": {name: dict(sorted(counts.items())) for name, counts in codes.items()},
        "seconds": round(time.monotonic() - started, 1),
    }


if __name__ == "__main__":
    run_program(__doc__, run_trials, "--trials", 60)

"""`kvq quantize` as a real process that can be killed or hindered at any call: a fork of one that has all imports done.

The fork needs no ten seconds of imports, and is otherwise what a shell would start: `kvq.__main__.main` with its
arguments, one process id, its own exit code. shim.c, preloaded, counts its calls. Meant for a process of its own, with
one thread.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from kvq.__main__ import main
from kvq.checkpoint.journal import FOLDER, parked
from kvq.console import RunProgress
from tests.checkpoints import TINY, Options, Tiny, make_checkpoint
from tests.runs import SETTINGS, output_bytes, quantize, write_calibration

READ, WRITE, SYNC, RENAME, OPEN, REMOVE, MAKE = (1 << bit for bit in range(7))
KINDS = {
    "read": READ, "write": WRITE, "fsync": SYNC, "rename": RENAME, "open": OPEN, "remove": REMOVE, "make": MAKE,
}  # fmt: skip
PRELOAD = "LD_PRELOAD"
FOREVER = 1 << 40


def enter_preloaded(scratch: Path) -> None:
    """Start this program anew with the shim preloaded and one thread, unless that has happened. Needs a C compiler."""
    library = scratch / "shim.so"
    if PRELOAD in os.environ and Path(os.environ[PRELOAD]).exists():
        return
    scratch.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("shim.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, PRELOAD: str(library), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "run it with -m"
    os.execve(sys.executable, [sys.executable, "-m", spec.name, *sys.argv[1:]], environment)


def run_program(
    description: str | None, work: Callable[[Path, int, int], dict[str, object]], flag: str, default: int
) -> None:
    """A command line for `work(scratch, number, seed)`, with the shim preloaded; its report as JSON on stdout."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(flag, dest="number", type=int, default=default)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scratch", type=Path, required=True)
    arguments = parser.parse_args()
    enter_preloaded(arguments.scratch)
    report = work(arguments.scratch / str(os.getpid()), arguments.number, arguments.seed)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


@dataclass(frozen=True)
class Fault:
    """From the n-th call of these kinds below the folder on: die (`errno` 0), or fail `times` times."""

    kinds: int
    at: int
    errno: int = 0
    times: int = FOREVER


def die_in(seconds: float) -> None:
    """Let this process be killed after a while, whatever it does then."""
    shim: Any = ctypes.CDLL(None)
    shim.faults_die_in(ctypes.c_long(round(seconds * 1e6)))


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (minus the signal if one ended it), what it wrote, the shim's words, the last
    stage that it announced, the number of stages, its calls by kind."""

    code: int
    words: str
    log: str
    stage: str
    stages: int
    calls: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A kind of run: source and recipe."""

    family: str
    source: str
    dims: Tiny = TINY
    settings: tuple[str, ...] = ()
    options: Options = field(default_factory=lambda: Options(block_size=(32, 32)))


SMALL = replace(TINY, num_hidden_layers=2, n_routed_experts=4, index_topk=16)
MODELS = {
    "dsa with MTP, gptq": Model("glm_moe_dsa", "fp8_block", SMALL),
    "mla, gptq": Model("kimi_k2", "fp8_block", SMALL),
    "gqa with MTP, rtn": Model("glm4_moe", "fp8_channel", SMALL, ("solver=rtn",)),
    "pass-through": Model("kimi_k25", "int4", SMALL, ("solver=rtn",)),
}


class Bench:
    """One source, and processes that quantize it into one output."""

    def __init__(self, folder: Path, model: Model) -> None:
        torch.set_num_threads(1)
        self.folder = folder.resolve()
        self.source = make_checkpoint(self.folder / "source", model.family, model.source, model.dims, **model.options)
        self.calibration = write_calibration(self.folder / "calibration.jsonl")
        self.out = self.folder / "place" / "out"
        self.partial = self.out.with_name("out.partial")
        self.out.parent.mkdir()
        self._settings = [flag for setting in (*SETTINGS, *model.settings) for flag in ("--set", setting)]
        self.straight = self._in_this_process(model)
        self._log, self._words = self.folder / "log", self.folder / "words"

    def _in_this_process(self, model: Model) -> dict[str, bytes]:
        """What an undisturbed run writes. It also imports here, once, what every fork would import."""
        warm = self.folder / "warm"
        quantize(self.source, warm, self.calibration, *model.settings)
        contents = output_bytes(warm)
        subprocess.run(["rm", "-rf", warm], check=True)
        return contents

    @property
    def command(self) -> list[str]:
        return [
            "kvq", "quantize", str(self.source), *self._settings, "--device", "cpu", "--json",
            "--calibration", str(self.calibration), "--out", str(self.out),
        ]  # fmt: skip

    def run(
        self,
        fault: Fault | None = None,
        *,
        kill_after: float | None = None,
        at_stage: Callable[[int], None] | None = None,
        where: Path | None = None,
        clock: int = 0,
    ) -> Ended:
        """Run the command to its end, or to its fault; `at_stage` is called in it with the number of each stage."""
        self._log.write_text("")
        calls, counted = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(calls)
            self._be_kvq(fault, at_stage, where or self.folder, clock, counted)
        os.close(counted)
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with os.fdopen(calls) as pipe:
            numbers = [int(number) for number in pipe.read().split()]
        _, status = os.waitpid(child, 0)
        lines = self._log.read_text().splitlines()
        stages = [line for line in lines if line.startswith("stage ")]
        log = "; ".join(line for line in lines if not line.startswith("stage "))
        return Ended(
            os.waitstatus_to_exitcode(status), self._words.read_text(errors="replace"), log,
            stages[-1] if stages else "", len(stages), dict(zip(KINDS.values(), numbers, strict=False)),
        )  # fmt: skip

    def _be_kvq(
        self, fault: Fault | None, at_stage: Callable[[int], None] | None, where: Path, clock: int, counted: int
    ) -> NoReturn:
        code = 99
        try:
            words = os.open(self._words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(words, 1)
            os.dup2(words, 2)
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
            _announce(log, at_stage)
            shim: Any = ctypes.CDLL(None)
            chosen = fault or Fault(sum(KINDS.values()), -1)
            shim.faults_arm(
                os.fsencode(where), chosen.kinds, ctypes.c_long(chosen.at), chosen.errno,
                ctypes.c_long(chosen.times), log,
            )  # fmt: skip
            shim.faults_clock(ctypes.c_ulong(clock))
            sys.argv = self.command
            code = _exit_code(main)
        except BaseException:
            traceback.print_exc()
            raise
        else:
            os.write(counted, " ".join(str(shim.faults_seen(kind)) for kind in KINDS.values()).encode())
        finally:
            os._exit(code)

    def contents(self) -> dict[str, bytes]:
        return output_bytes(self.out)

    def remove_output(self) -> dict[str, bytes]:
        contents = self.contents()
        subprocess.run(["rm", "-rf", self.out], check=True)
        return contents

    def left_over(self) -> list[str]:
        """Names in the place of the output beside the output."""
        return sorted(path.name for path in self.out.parent.iterdir() if path != self.out)

    def problem(self) -> str:
        """What is wrong with the output that a run left which was cut off; none, or a whole one, is right."""
        if not self.out.exists():
            return ""
        if self.contents() != self.straight:
            return "an output that looks finished differs from that of an uninterrupted run"
        return "the journal is still in the output" if (self.out / FOLDER).exists() else ""

    @property
    def parked(self) -> Path:
        return parked(self.partial)


def _announce(log: int, at_stage: Callable[[int], None] | None) -> None:
    """Let the run write each stage into the log."""
    count = 0

    def stage(self: RunProgress, layer: int | None, num_layers: int, text: str) -> None:
        nonlocal count
        os.write(log, f"stage {layer} {text}\n".encode())
        if at_stage is not None:
            at_stage(count)
        count += 1

    RunProgress.stage = stage  # type: ignore[method-assign]


def _exit_code(call: Callable[[], None]) -> int:
    try:
        call()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return 0


def chances(seed: int) -> Iterator[random.Random]:
    """One generator per trial, so that a trial can be repeated alone."""
    number = 0
    while True:
        yield random.Random(f"{seed}:{number}")
        number += 1

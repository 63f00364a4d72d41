"""Prints, as JSON, what each of some runs added to this process's memory at its peak. Linux only.

`python -m tests.measure_memory FOLDER NAME...`: FOLDER holds the sources and the calibration data; the first NAME is
run unmeasured, so that all imports and first-use buffers are there before anything is measured.
"""

import json
import sys
from pathlib import Path

from kvq.checkpoint.source import Source
from kvq.pipeline import prepare, quantize_checkpoint
from kvq.recipes.schema import Recipe
from tests.runs import CALIBRATION, Quiet

# Quick settings of the default solver; what is held from layer to layer does not depend on them.
RECIPE = Recipe(
    name="quick", num_calibration_samples=8, max_seq_length=64, scale_search="minmax", refinement_passes=0,
    block_size=32,
)  # fmt: skip


def memory(key: str) -> int:
    """Bytes of `VmRSS` (resident now) or `VmHWM` (most resident since the last reset)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def run(folder: Path, name: str) -> int:
    """Quantize one source; bytes at the peak above what was resident before."""
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # start a new peak
    source = Source(folder / name, name)
    prepared = prepare(source, RECIPE, folder / f"{name}-out", device="cpu", calibration=folder / CALIBRATION)
    quantize_checkpoint(prepared, Quiet())
    return memory("VmHWM") - before


if __name__ == "__main__":
    added = {name: run(Path(sys.argv[1]), name) for name in sys.argv[2:]}
    sys.stdout.write(json.dumps(added) + "\n")

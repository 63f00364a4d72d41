"""Quantize checkpoints with several recipes and measure what it cost: size, time, memory, distance to the source.

    python benchmarks/compare_recipes.py --data EVAL.jsonl --model SOURCE CALIBRATION [--model ...] \
        [--device cuda] [--budget 256x512 ...] [--recipe "NAME [KEY=VALUE ...]" ...]

Every run is the `kvq` command in a process of its own; peak RSS is that process's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEFAULT_RECIPES = ["int4-rtn", "int4-rtn group_size=32", "int4", "int4-g32"]
COLUMNS = (
    "model", "recipe", "calibrated on", "MB before", "MB after", "quantize s", "peak RSS GiB", "peak GPU GiB",
    "mean KL", "99 % KL", "same top p", "ppl ratio",
)  # fmt: skip


def run_kvq(*arguments: str) -> tuple[dict[str, Any], float, float]:
    """Result, wall seconds and peak RSS in GiB of one kvq command with --json."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as stdout:
        command = [sys.executable, "-m", "kvq", *arguments, "--json"]
        process = subprocess.Popen(command, stdout=stdout)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
        stdout.seek(0)
        return json.loads(stdout.read()), seconds, usage.ru_maxrss / 2**20


def measure(model: tuple[str, str], recipe: str, budget: str, arguments: argparse.Namespace) -> str:
    """One row of the table."""
    source, calibration = model
    name, *settings = recipe.split()
    samples, length = budget.split("x")
    settings += [f"num_calibration_samples={samples}", f"max_seq_length={length}"]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        out = str(Path(folder) / "out")
        made, seconds, rss = run_kvq(
            "quantize",
            source,
            "--w",
            name,
            *flags,
            "--calibration",
            calibration,
            "--out",
            out,
            "--device",
            arguments.device,
        )
        evaluation, _, _ = run_kvq(
            "evaluate", out, "--source", source, "--data", arguments.data, "--max-rows", str(arguments.rows),
            "--device", arguments.device, "--no-damage",
        )  # fmt: skip
    figures = evaluation["distance"]["figures"]
    summary, tokens = made["summary"], made["calibration"]
    used = f"{tokens['num_sequences']}x{tokens['sequence_length']}" if tokens else "none"
    gpu = made["peak_device_bytes"]
    cells = [
        Path(source).name, recipe, used, f"{summary['source_bytes'] / 1e6:.2f}", f"{summary['output_bytes'] / 1e6:.2f}",
        f"{seconds:.1f}", f"{rss:.2f}", f"{gpu / 2**30:.2f}" if gpu else "-", f"{figures['mean_kld']['value']:.5f}",
        f"{figures['percentile_kld']['99']['value']:.4f}", f"{figures['same_top_p']['value']:.4f}",
        f"{figures['ppl_ratio']['value']:.5f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=2, action="append", required=True, metavar=("SOURCE", "CALIBRATION"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--budget", action="append")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scratch", default=None, help="folder for the outputs; by default the system's")
    arguments = parser.parse_args()
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    for model in arguments.model:
        for recipe in arguments.recipe or DEFAULT_RECIPES:
            budgets = arguments.budget or ["256x512"]
            for budget in budgets if "rtn" not in recipe else budgets[:1]:
                sys.stdout.write(measure(tuple(model), recipe, budget, arguments) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()

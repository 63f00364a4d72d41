"""Mean KL of recipes that differ from the default in one thing, on small checkpoints: the tables of docs/quality.md.

    python benchmarks/choices.py TABLE --model SOURCE CALIBRATION [--model ...] --data EVAL.jsonl --held-out OTHER.jsonl

TABLE is a name of TABLES below. All commands run in this process, one after the other: only the figures mean anything.
Rows of calibration data are taken in the order of the file unless a row of the table says `order=SEED`: then they are
shuffled by that seed, so that other rows come first.
"""

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvq.cli import app

BUDGET = "num_calibration_samples=48 max_seq_length=256"
TABLES = {
    "order": ["", "order=0", "order=1", "order=2"],
    "samples": [f"num_calibration_samples={n}" for n in (16, 32, 64, 128, 256)],
    "length": [f"num_calibration_samples={12288 // n} max_seq_length={n}" for n in (64, 128, 512, 2048)],
    "dampening": [f"dampening_frac={value}" for value in (0.003, 0.01, 0.1, 0.3)],
    "solver": ["scale_search=minmax", "actorder=null"],
    "hessian": ["hessian=routed", "hessian=layer"],
}


def kvq(*arguments: str) -> Any:
    """What a command prints with --json."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        app([*arguments, "--device", "cpu", "--json"], standalone_mode=False)
    return json.loads(printed.getvalue())


def shuffled(calibration: Path, seed: int, folder: Path) -> Path:
    """The same rows in another order."""
    rows = calibration.read_text().splitlines(keepends=True)
    random.Random(seed).shuffle(rows)
    (copy := folder / "rows.jsonl").write_text("".join(rows))
    return copy


def measure(source: str, calibration: Path, settings: str, kept: Path, arguments: argparse.Namespace) -> list[float]:
    """Mean KL over both sets of texts. What the source says to them is kept for the next row."""
    chosen = dict(setting.split("=") for setting in (BUDGET + " " + settings).split())
    order = chosen.pop("order", None)
    with tempfile.TemporaryDirectory() as folder:
        place = calibration if order is None else shuffled(calibration, int(order), Path(folder))
        flags = [flag for key, value in chosen.items() for flag in ("--set", f"{key}={value}")]
        out = str(Path(folder) / "out")
        kvq("quantize", source, "--w", "int4", "--out", out, "--calibration", str(place), *flags)
        found = []
        for data, rows in ((arguments.data, arguments.rows), (arguments.held_out, 10**6)):
            base = kept / f"{Path(source).name}-{Path(data).name}"
            once = ["--base-logits" if base.exists() else "--save-base-logits", str(base)]
            report = kvq(
                "evaluate", out, "--source", source, "--data", data, "--max-rows", str(rows), "--no-damage", *once
            )  # fmt: skip
            found.append(report["distance"]["figures"]["mean_kld"]["value"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--model", nargs=2, action="append", required=True, metavar=("SOURCE", "CALIBRATION"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--rows", type=int, default=24, help="of --data")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print_table(arguments, Path(folder))


def print_table(arguments: argparse.Namespace, kept: Path) -> None:
    """A row of the table for each of its settings, a column for each model."""
    names = [Path(source).name for source, _ in arguments.model]
    sys.stdout.write(f"| {BUDGET} | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}\n")
    for settings in TABLES[arguments.table]:
        cells = []
        for source, calibration in arguments.model:
            values = measure(source, Path(calibration), settings, kept, arguments)
            cells.append(" / ".join(f"{value:.5f}" for value in values))
        sys.stdout.write(f"| {settings or 'the default'} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

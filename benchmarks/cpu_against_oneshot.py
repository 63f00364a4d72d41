"""`kvq quantize` beside llm-compressor's `oneshot` on one small checkpoint and one machine, in one run.

    python benchmarks/cpu_against_oneshot.py SOURCE CALIBRATION --data EVAL.jsonl [--budget 48x256] [--repeats 3]

Both quantize the routed experts to INT4 in groups of 128 with GPTQ, on the same tokens. Each repeat starts each in a
process of its own, one after the other. Such a process does its job twice: the whole command is its start to the end of
the first, and the second, when everything has been imported, is the work alone. In both are: reading the weights and
the data, quantizing, writing. `oneshot` cannot read FP8 checkpoints; the dequantized copy that it starts from is made
beforehand and not counted.

llm-compressor runs twice: as it comes, and with `batched_quantization=16` (on a CPU it solves one matrix at a time
unless told otherwise). In float32 both, as kvq computes on a CPU.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OURS, THEIRS, BATCHED = "kvq quantize", "oneshot", "oneshot, 16 matrices at a time"


def run_ours(source: Path, calibration: Path, budget: tuple[int, int], out: Path) -> None:
    """The command itself."""
    from kvq.cli import app

    samples, length = budget
    app(
        ["quantize", str(source), "--w", "int4", "--set", f"num_calibration_samples={samples}", "--set",
         f"max_seq_length={length}", "--calibration", str(calibration), "--device", "cpu", "--out", str(out), "--json"],
        standalone_mode=False,
    )  # fmt: skip


def run_theirs(copy: Path, rows: Path, budget: tuple[int, int], out: Path, batched: int | None) -> None:
    """Load, `oneshot`, save: what its examples do."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.utils import load_context
    from transformers import AutoModelForCausalLM

    # transformers lists attributes of image processors while it patches a model, and those need torchvision.
    for name in [n for n in sys.modules if "image_processing" in n and n.endswith("_fast")]:
        del sys.modules[name]
    with load_context():
        model = AutoModelForCausalLM.from_pretrained(copy, dtype="float32")
    data = Dataset.from_dict({"input_ids": (ids := json.loads(rows.read_text())), "attention_mask": [
        [1] * len(row) for row in ids
    ]})  # fmt: skip
    solver = GPTQModifier(
        targets=[r"re:.*mlp\.experts\..*_proj$"], scheme="W4A16", batched_quantization=batched or "auto"
    )
    oneshot(
        model=model, dataset=data, recipe=solver, num_calibration_samples=budget[0], max_seq_length=budget[1],
        batch_size=8, shuffle_calibration_samples=False, clear_sparse_session=True,
    )  # fmt: skip
    model.save_pretrained(out, save_compressed=True)


def child(arguments: argparse.Namespace) -> None:
    """One job, twice; prints the seconds of the whole command and of the second job."""
    # What Python needed to start is counted by the clock of the process that started it.
    for number in range(2):
        out = arguments.scratch / f"out-{number}"
        started = time.monotonic()
        if arguments.job == OURS:
            run_ours(arguments.source, arguments.calibration, arguments.budget, out)
        else:
            batched = 16 if arguments.job == BATCHED else None
            run_theirs(arguments.scratch / "plain", arguments.scratch / "rows.json", arguments.budget, out, batched)
        ended = time.monotonic()
        if number == 0:
            first = ended - arguments.began
    (arguments.scratch / "seconds.json").write_text(json.dumps([first, ended - started]))


def start(job: str, arguments: argparse.Namespace, scratch: Path) -> tuple[float, float, float]:
    """Seconds of the whole command, of the work alone, and peak GiB of a fresh process; leaves out-0 in scratch."""
    for number in range(2):
        shutil.rmtree(scratch / f"out-{number}", ignore_errors=True)
    command = [sys.executable, __file__, str(arguments.source), str(arguments.calibration), "--job", job]
    command += ["--scratch", str(scratch), "--budget", "x".join(map(str, arguments.budget))]
    process = subprocess.Popen([*command, "--began", repr(time.monotonic())], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{job} failed with exit code {process.returncode}")
    whole, work = json.loads((scratch / "seconds.json").read_text())
    return whole, work, usage.ru_maxrss / 2**20


def make_inputs(arguments: argparse.Namespace, scratch: Path) -> float:
    """The float32 copy and the token rows that kvq itself would use; seconds that this took."""
    from safetensors.torch import save_file

    from kvq.calibration.dataset import load_packed
    from kvq.checkpoint.dequant import load_weight
    from kvq.checkpoint.reader import CheckpointReader
    from kvq.recipes.plan import resolve_plan
    from kvq.recipes.schema import load_recipe

    started = time.monotonic()
    reader = CheckpointReader(arguments.source)
    source = resolve_plan(load_recipe("int4-rtn"), reader.config, reader.index).source
    (copy := scratch / "plain").mkdir()
    scales = (".weight_scale", ".weight_scale_inv")
    tensors = {
        name: load_weight(reader, source, name.removesuffix(".weight")) if name.endswith(".weight") else
        reader.tensor(name) for name in reader.index.tensors if not name.endswith(scales)
    }  # fmt: skip
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    # transformers has no kimi_k2 without code of the checkpoint's own; it is deepseek_v3 under another name.
    config = {key: value for key, value in reader.config.items() if key not in ("quantization_config", "auto_map")}
    config["model_type"] = config["model_type"].replace("kimi_k2", "deepseek_v3")
    (copy / "config.json").write_text(json.dumps(config))
    for path in arguments.source.glob("tokenizer*"):
        shutil.copy(path, copy)
    tokens = load_packed(arguments.source, config["vocab_size"], arguments.calibration, *arguments.budget)
    (scratch / "rows.json").write_text(json.dumps(tokens.tokens_NS.tolist()))
    return time.monotonic() - started


def mean_kl(checkpoint: Path, arguments: argparse.Namespace) -> float:
    """To the FP8 source, by `kvq evaluate`."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["model_type"] = json.loads((arguments.source / "config.json").read_text())["model_type"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "kvq", "evaluate", str(checkpoint), "--source", str(arguments.source)]
    command += ["--data", str(arguments.data), "--max-rows", str(arguments.rows), "--device", "cpu", "--no-damage"]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, check=True)
    value: float = json.loads(done.stdout)["distance"]["figures"]["mean_kld"]["value"]
    return value


def compare(arguments: argparse.Namespace, scratch: Path) -> None:
    copying = make_inputs(arguments, scratch)
    found: dict[str, list[tuple[float, float, float]]] = {OURS: [], THEIRS: [], BATCHED: []}
    kl: dict[str, float] = {}
    for number in range(arguments.repeats):
        for job, rows in found.items():
            rows.append(start(job, arguments, scratch))
            sys.stdout.write(f"{job}: {rows[-1][0]:.1f} s, work alone {rows[-1][1]:.1f} s\n")
            sys.stdout.flush()
            if number == 0 and arguments.data is not None:
                kl[job] = mean_kl(scratch / "out-0", arguments)
    sys.stdout.write(f"\ndequantized copy and token rows for oneshot: {copying:.1f} s, not counted\n\n")
    sys.stdout.write("| | whole command s | work alone s | peak RSS GiB | mean KL |\n|---|---|---|---|---|\n")
    middle = {job: [statistics.median(column) for column in zip(*rows, strict=True)] for job, rows in found.items()}
    for job, (whole, work, peak) in middle.items():
        sys.stdout.write(f"| {job} | {whole:.1f} | {work:.1f} | {peak:.2f} | {kl.get(job, float('nan')):.5f} |\n")
    for job in (THEIRS, BATCHED):
        ratios = " and ".join(f"{middle[OURS][i] / middle[job][i]:.2f}" for i in range(2))
        sys.stdout.write(f"kvq over {job}: {ratios}\n")


def parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--data", type=Path, help="held-out rows; without them no KL")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--budget", type=lambda text: tuple(map(int, text.split("x"))), default=(48, 256))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.job:
        child(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="kvq-oneshot-") as folder:
        compare(arguments, Path(folder))


if __name__ == "__main__":
    main()

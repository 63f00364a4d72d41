"""Streaming evaluation against loading both models whole: equal figures, time, peak memory.

    python benchmarks/streaming_evaluation.py CHECKPOINT SOURCE --data EVAL.jsonl --scratch FOLDER \
        [--repeat 4] [--rows 4]

The MoE layers of both checkpoints are repeated, because small models hide what a model's depth costs. Each way runs in
a process of its own; peak RSS is that process's, less what it had when everything was imported.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvq.calibration.forward import ModelRunner
from kvq.calibration.whole_model import load_whole_model
from kvq.checkpoint.architecture import model_facts
from kvq.checkpoint.reader import CheckpointReader
from kvq.verify.documents import Cut, load_evaluation_set
from kvq.verify.evaluation import Request, evaluate_checkpoint
from kvq.verify.figures import Figures, summarize
from kvq.verify.logits import Positions, position_rows

CPU = torch.device("cpu")
MAX_SEQ_LENGTH = 256
AGREE = 1e-6  # nats; sums of the same numbers in another order, in float32


def deepen(folder: Path, out: Path, repeat: int) -> None:
    """Write a copy whose MoE layers come `repeat` times, one after the other, in one shard and without an MTP layer."""
    config = json.loads((folder / "config.json").read_text())
    facts = model_facts(config, folder)
    moe = [layer for layer in facts.moe_layers if layer < facts.num_layers]
    tensors = {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
    deep: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        place = facts.place_of(name)
        if place is None or place[0] not in moe:
            deep |= {name: value} if place is None or place[0] < facts.num_layers else {}
            continue
        for turn in range(repeat):
            deep[facts.layer_prefix(place[0] + turn * len(moe)) + place[1]] = value.clone()
    out.mkdir(parents=True)
    save_file(deep, out / "model.safetensors", metadata={"format": "pt"})
    changed = {**config, "num_hidden_layers": facts.num_layers + (repeat - 1) * len(moe), "num_nextn_predict_layers": 0}
    (out / "config.json").write_text(json.dumps(changed))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (out / name).write_bytes((folder / name).read_bytes())


def streaming(checkpoint: Path, source: Path, data: Path, rows: int, damage: bool) -> Figures:
    request = Request(checkpoint, source, "source", [data], Cut(rows, MAX_SEQ_LENGTH), damage=damage)
    return evaluate_checkpoint(request, CPU, lambda text: None).figures


def whole(checkpoint: Path, source: Path, data: Path, rows: int) -> Figures:
    runners = [ModelRunner(CheckpointReader(folder), CPU) for folder in (source, checkpoint)]
    vocab_size = int(runners[0].facts.text_config["vocab_size"])
    documents = load_evaluation_set(source, checkpoint, vocab_size, [data], Cut(rows, MAX_SEQ_LENGTH)).documents
    models = [load_whole_model(runner) for runner in runners]
    for runner in runners:
        runner.reader.release()
    parts = []
    with torch.no_grad():
        for number, document in enumerate(documents):
            ids_S = document.tokens_S
            base_PV, other_PV = (
                model(ids_S.unsqueeze(0), use_cache=False).logits[0].double().log_softmax(-1) for model in models
            )
            columns = position_rows(base_PV, other_PV, torch.cat([ids_S[1:], torch.tensor([-1])]))
            parts.append(Positions(*columns, torch.full((len(ids_S),), number), torch.arange(len(ids_S))))
    return summarize(Positions.join(parts))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(run: Callable[[], Figures]) -> dict[str, Any]:
    before, started, used = peak_bytes(), time.monotonic(), time.process_time()
    figures = run()
    return {
        "seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - used,
        "peak_bytes": peak_bytes() - before, "kl": figures.mean_kld.value,
        "top": figures.same_top_p.value, "ratio": figures.ppl_ratio.value if figures.ppl_ratio else None,
    }  # fmt: skip


def in_own_process(way: str, arguments: argparse.Namespace, checkpoint: Path, source: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, str(checkpoint), str(source), "--data", str(arguments.data)]
    command += ["--rows", str(arguments.rows), "--way", way, "--scratch", str(arguments.scratch)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for the deepened copies")
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--way", choices=("whole", "streaming", "streaming-with-damage"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    places = arguments.checkpoint, arguments.source, arguments.data, arguments.rows
    if arguments.way is not None:
        damage = arguments.way == "streaming-with-damage"
        way = (lambda: whole(*places)) if arguments.way == "whole" else (lambda: streaming(*places, damage))
        sys.stdout.write(json.dumps(measured(way)))
        return
    columns = ("layers", "way", "seconds", "CPU seconds", "peak MB", "mean KL", "same top p", "PPL ratio")
    sys.stdout.write(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
    for repeat in (arguments.repeat, 2 * arguments.repeat):
        deep = [arguments.scratch / f"{name}-x{repeat}" for name in ("checkpoint", "source")]
        for folder, out in zip((arguments.checkpoint, arguments.source), deep, strict=True):
            deepen(folder, out, repeat)
        layers = json.loads((deep[0] / "config.json").read_text())["num_hidden_layers"]
        found = {way: in_own_process(way, arguments, *deep) for way in ("whole", "streaming", "streaming-with-damage")}
        for way, row in found.items():
            cost = f"{row['seconds']:.1f} | {row['cpu_seconds']:.1f} | {row['peak_bytes'] / 1e6:.0f}"
            figures = f"{row['kl']:.9f} | {row['top']:.6f} | {row['ratio']:.9f}"
            sys.stdout.write(f"| {layers} | {way} | {cost} | {figures} |\n")
            sys.stdout.flush()
            if abs(row["kl"] - found["whole"]["kl"]) > AGREE * max(1.0, found["whole"]["kl"]):
                raise SystemExit(f"{way}: mean KL {row['kl']} differs from the whole models' {found['whole']['kl']}")


if __name__ == "__main__":
    main()

"""Distances of checkpoints from their sources, with the KV cache as it is and in FP8: one row each, by domain too.

    python benchmarks/evaluation_table.py --pair CHECKPOINT SOURCE DATA [--pair ...] \
        [--kv-dtype fp8_e4m3 ...] [--rows N] [--length N] [--long-context N]

A checkpoint may be its own source: the row then shows what the FP8 KV cache alone costs. The source's side of each pair
is computed once and kept, so that further KV dtypes cost half.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from kvq.verify.documents import Cut
from kvq.verify.evaluation import Evaluation, Request, evaluate_checkpoint

COLUMNS = (
    "source", "checkpoint", "KV cache", "positions", "mean KLD", "99 % KLD", "same top p", "PPL ratio", "RMS delta p",
    "by domain: mean KLD", "worst layer: own error", "CPU s",
)  # fmt: skip


def row(found: Evaluation, kv_dtype: str | None, seconds: float) -> str:
    figures, distance = found.figures, found.distance
    domains = [f"{name} {part['mean_kld']['value']:.5f}" for name, part in distance["domains"].items()]
    if distance["long_context"] is not None:
        long = distance["long_context"]
        domains.append(f"{long['num_sequences']}x{long['length']} {long['figures']['mean_kld']['value']:.5f}")
    worst = found.damage["worst"]["layers"][:1] if found.damage is not None else []
    same = distance["checkpoint"]["is_source"]
    cells = [
        distance["source"]["id"], "the source" if same else str(distance["checkpoint"]["recipe"]), kv_dtype or "-",
        str(figures.num_positions), f"{figures.mean_kld.value:.5f} +/- {figures.mean_kld.document_error or 0:.5f}",
        f"{figures.percentile_kld['99'].value:.4f}", f"{figures.same_top_p.value:.4f}",
        f"{figures.ppl_ratio.value:.5f}" if figures.ppl_ratio else "-",
        f"{figures.rms_delta_p.value:.5f}" if figures.rms_delta_p else "-", "; ".join(domains),
        ", ".join(f"layer {part['layer']}: {part['own_error']:.4f}" for part in worst) or "-", f"{seconds:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs=3, action="append", required=True, metavar=("CHECKPOINT", "SOURCE", "DATA"))
    parser.add_argument("--kv-dtype", action="append", default=[])
    parser.add_argument("--rows", type=int, default=None)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--long-context", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    cut, device = Cut(arguments.rows, arguments.length, arguments.long_context), torch.device(arguments.device)
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "base.safetensors"
        for checkpoint, source, data in (map(Path, pair) for pair in arguments.pair):
            asked = Request(checkpoint, source, source.name, [data], cut, save_base_logits=kept)
            for kv_dtype in (None, *arguments.kv_dtype):
                started = time.process_time()
                found = evaluate_checkpoint(replace(asked, kv_dtype=kv_dtype), device, lambda text: None)
                sys.stdout.write(row(found, kv_dtype, time.process_time() - started) + "\n")
                sys.stdout.flush()
                asked = replace(asked, save_base_logits=None, base_logits=kept)


if __name__ == "__main__":
    main()

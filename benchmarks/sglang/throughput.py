"""FP8 against INT4 experts on one GPU: decode and prefill, each at 1, 8, 32 and 64 requests at once.

    python benchmarks/sglang/throughput.py [--shape glm-5.2] [--tp-slice 8] [--layers 16] [--marlin] [--out ./out]

Writes the model of synthetic.py in FP8, serves it, deletes it; the same in INT4. Prompts are random tokens, no prefix
is cached. The first token of a request is its prefill. Decode is the time of 1 + N tokens less that of one token, by N.
CUDA graphs are on for decode. --marlin also measures INT4 with the Marlin kernel, which is compiled at first use (over
4 minutes), beside the other measurements. Results are written after each measurement; a failure ends its variant only.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import ServerDiedError, ask_all, serving
from synthetic import SHAPES, write_model

CONCURRENCY = (1, 8, 32, 64)
PROMPT_TOKENS, DECODE_PROMPT_TOKENS, NEW_TOKENS, REPEATS = 2048, 128, 128, 3
ENVIRONMENT = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
SETTINGS = {
    "load-format": "auto", "skip-tokenizer-init": True, "attention-backend": "triton", "sampling-backend": "pytorch",
    "grammar-backend": "none", "disable-shared-experts-fusion": True, "disable-radix-cache": True,
    "max-running-requests": 64, "max-total-tokens": 160_000, "context-length": 4096, "chunked-prefill-size": 8192,
    "mem-fraction-static": 0.85, "cuda-graph-bs-decode": list(CONCURRENCY), "disable-prefill-cuda-graph": True,
    "log-level": "warning", "tp-size": 1,
}  # fmt: skip
VARIANTS = {"fp8": ("fp8", "triton"), "int4-triton": ("int4", "triton"), "int4-marlin": ("int4", "marlin")}
COMPILE_MARLIN = (
    "import torch\n"
    "from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module as compile\n"
    "compile(torch.bfloat16, False, False)\n"
)


def bodies(
    count: int, prompt_tokens: int, new_tokens: int, vocabulary: int, draw: random.Random
) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return [
        {"input_ids": [draw.randrange(2, vocabulary) for _ in range(prompt_tokens)], "sampling_params": sampling}
        for _ in range(count)
    ]


def one_round(count: int, prompt_tokens: int, new_tokens: int, draw: random.Random) -> tuple[float, float]:
    """Mean seconds of a request, and seconds until the last one was answered."""
    requests = bodies(count, prompt_tokens, new_tokens, 16384, draw)
    started = time.monotonic()
    answers = ask_all(requests, at_once=count)
    return statistics.fmean(seconds for seconds, _ in answers), time.monotonic() - started


def measure(count: int, draw: random.Random) -> dict[str, float]:
    """Medians over REPEATS rounds, after one round that is not counted."""
    one_round(count, DECODE_PROMPT_TOKENS, 8, draw)
    one_round(count, PROMPT_TOKENS, 1, draw)
    first, whole, prefill = [], [], []
    for _ in range(REPEATS):
        first.append(one_round(count, DECODE_PROMPT_TOKENS, 1, draw)[0])
        whole.append(one_round(count, DECODE_PROMPT_TOKENS, 1 + NEW_TOKENS, draw)[0])
        prefill.append(one_round(count, PROMPT_TOKENS, 1, draw))
    step = (statistics.median(whole) - statistics.median(first)) / NEW_TOKENS
    makespan = statistics.median(seconds for _, seconds in prefill)
    return {
        "concurrency": count,
        "decode_ms_per_token": 1000 * step,
        "decode_tokens_per_s": count / step,
        "first_token_ms": 1000 * statistics.median(mean for mean, _ in prefill),
        "prefill_tokens_per_s": count * PROMPT_TOKENS / makespan,
    }


def run_variant(model: Path, runner: str, log: Path) -> Iterator[dict[str, Any]]:
    """Start-up time first, then a row for each concurrency."""
    settings = {**SETTINGS, "model-path": str(model), "moe-runner-backend": runner}
    with serving(settings, log, ENVIRONMENT, wait_s=280) as seconds:
        yield {"engine_up_s": round(seconds, 1)}
        draw = random.Random(0)
        for count in CONCURRENCY:
            yield measure(count, draw)


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each concurrency; beside INT4's figures the ratio to FP8's."""
    lines = ["| at once | variant | decode ms/token | decode tokens/s | first token ms (2,048 in) | prefill tokens/s |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    base = {row["concurrency"]: row for row in results.get("fp8", []) if "concurrency" in row}
    keys = ("decode_ms_per_token", "decode_tokens_per_s", "first_token_ms", "prefill_tokens_per_s")
    for count in CONCURRENCY:
        for variant, rows in results.items():
            for row in rows:
                if row.get("concurrency") == count:
                    cells = []
                    for key in keys:
                        ratio = f" (x{row[key] / base[count][key]:.2f})" if variant != "fp8" and count in base else ""
                        cells.append(f"{row[key]:.2f}{ratio}" if "ms" in key else f"{row[key]:,.0f}{ratio}")
                    lines.append(f"| {count} | {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="glm-5.2")
    parser.add_argument("--tp-slice", type=int, choices=[1, 2, 4, 8], default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--marlin", action="store_true")
    parser.add_argument("--budget-s", type=float, default=560, help="nothing new is begun with less than a fifth left")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/kvq-synthetic"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "./out")))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    compiling = subprocess.Popen([sys.executable, "-c", COMPILE_MARLIN]) if arguments.marlin else None
    results: dict[str, list[dict[str, Any]]] = {}
    written: dict[str, Any] = {
        "shape": arguments.shape, "tp_slice": arguments.tp_slice, "layers": arguments.layers,
        "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "results": results,
    }  # fmt: skip
    made = None
    for variant, (kind, runner) in VARIANTS.items():
        if variant == "int4-marlin" and (
            compiling is None or not _finished(compiling, started + arguments.budget_s * 0.7)
        ):
            continue
        if time.monotonic() - started > arguments.budget_s * 0.8:
            results[variant] = [{"error": "no time left"}]
            continue
        try:
            if made != kind:
                shutil.rmtree(arguments.scratch, ignore_errors=True)
                begun = time.monotonic()
                total = write_model(arguments.scratch, kind, arguments.shape, arguments.tp_slice, arguments.layers)
                written[f"{kind}_bytes"] = total
                _say(f"{kind}: {total / 1e9:.1f} GB written in {time.monotonic() - begun:.0f} s")
                made = kind
            results[variant] = []
            for row in run_variant(arguments.scratch, runner, arguments.out / f"{variant}.log"):
                results[variant].append(row)
                _say(f"{variant}: {json.dumps(row)}")
                (arguments.out / "throughput.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
        except (ServerDiedError, OSError, RuntimeError) as error:
            results.setdefault(variant, []).append({"error": f"{type(error).__name__}: {error}"})
            _say(f"{variant}: {error}")
    (arguments.out / "throughput.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    shutil.rmtree(arguments.scratch, ignore_errors=True)
    if compiling is not None and compiling.poll() is None:
        compiling.kill()
    _say("\n" + table(results))


def _finished(process: "subprocess.Popen[bytes]", deadline: float) -> bool:
    """Whether the compilation has ended well; waits for it until the deadline."""
    try:
        return process.wait(timeout=max(0.0, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        return False


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""FP8 against INT4 experts on one GPU: decode and prefill, each at 1, 8, 32 and 64 requests at once.

    python benchmarks/sglang/throughput.py [--shape glm-5.2] [--tp-slice 8] [--layers 16] [--marlin] [--out ./out]

Writes the model of synthetic.py in FP8, serves it, deletes it; the same in INT4. Prompts are random tokens, no prefix
is cached. Decode and prefill are measured apart, one after the other, on the same server: decode is the time of 1 + N
tokens less that of one token, by N; prefill is the time to the only token of a long prompt. CUDA graphs are on for
decode. --phases decode (or prefill) measures one of them. Results are written after each measurement; a failure ends
its variant only.

With Marlin beside Triton, FP8 against INT4, in one command:

    python benchmarks/sglang/throughput.py --layers 4 --marlin

--marlin also measures INT4 with the Marlin kernel. SGLang compiles two of its kernels at first use, the product (over 4
minutes on 16 cores) and the repacking; both compilations begin when the script does, side by side, and the other
variants are measured meanwhile. Expected: the compilation and about a minute more, since FP8 and INT4 by Triton are
done within it; --budget-s (560) is a command's limit of ten minutes. The compilation itself was not timed to its end.
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
from collections.abc import Iterator, Sequence
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
    "compile(torch.bfloat16, False, False)\n",
    "from sglang.kernels.ops.quantization.gptq_marlin_repack import _jit_gptq_marlin_repack_module as compile\n"
    "compile()\n",
)
PHASES = ("decode", "prefill")


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


def measure_decode(count: int, draw: random.Random) -> dict[str, float]:
    """Medians over REPEATS rounds, after one round that is not counted."""
    one_round(count, DECODE_PROMPT_TOKENS, 8, draw)
    first, whole = [], []
    for _ in range(REPEATS):
        first.append(one_round(count, DECODE_PROMPT_TOKENS, 1, draw)[0])
        whole.append(one_round(count, DECODE_PROMPT_TOKENS, 1 + NEW_TOKENS, draw)[0])
    step = (statistics.median(whole) - statistics.median(first)) / NEW_TOKENS
    return {"concurrency": count, "decode_ms_per_token": 1000 * step, "decode_tokens_per_s": count / step}


def measure_prefill(count: int, draw: random.Random) -> dict[str, float]:
    """As `measure_decode`: nothing is decoded but the token that ends a prefill."""
    one_round(count, PROMPT_TOKENS, 1, draw)
    rounds = [one_round(count, PROMPT_TOKENS, 1, draw) for _ in range(REPEATS)]
    makespan = statistics.median(seconds for _, seconds in rounds)
    return {
        "concurrency": count,
        "first_token_ms": 1000 * statistics.median(mean for mean, _ in rounds),
        "prefill_tokens_per_s": count * PROMPT_TOKENS / makespan,
    }


MEASURE = {"decode": measure_decode, "prefill": measure_prefill}


def run_variant(model: Path, runner: str, log: Path, phases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Start-up time first, then for each phase a row of each concurrency."""
    settings = {**SETTINGS, "model-path": str(model), "moe-runner-backend": runner}
    with serving(settings, log, ENVIRONMENT, wait_s=280) as seconds:
        yield {"engine_up_s": round(seconds, 1)}
        draw = random.Random(0)
        for phase in phases:
            for count in CONCURRENCY:
                yield {"phase": phase, **MEASURE[phase](count, draw)}


COLUMNS = {
    "decode": {"decode_ms_per_token": "decode ms/token", "decode_tokens_per_s": "decode tokens/s"},
    "prefill": {"first_token_ms": "first token ms (2,048 in)", "prefill_tokens_per_s": "prefill tokens/s"},
}


def table(results: dict[str, list[dict[str, Any]]], phase: str) -> str:
    """A row for each concurrency; beside INT4's figures the ratio to FP8's."""
    columns = COLUMNS[phase]
    lines = [f"| at once | variant | {' | '.join(columns.values())} |", "|---" * (2 + len(columns)) + "|"]
    found = {
        (row["concurrency"], variant): row
        for variant, rows in results.items() for row in rows if row.get("phase") == phase
    }  # fmt: skip
    for count, variant in sorted(found, key=lambda place: (place[0], list(results).index(place[1]))):
        base, cells = found.get((count, "fp8")), []
        for key in columns:
            value = found[count, variant][key]
            ratio = f" (x{value / base[key]:.2f})" if base is not None and variant != "fp8" else ""
            cells.append(f"{value:.2f}{ratio}" if "ms" in key else f"{value:,.0f}{ratio}")
        lines.append(f"| {count} | {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def why_not(
    variant: str, compiling: Sequence["subprocess.Popen[bytes]"], started: float, budget_s: float
) -> str | None:
    """What keeps a variant from being measured; waits for Marlin's kernels."""
    if variant == "int4-marlin":
        ended = _all_finished(compiling, started + budget_s * 0.75)
        _say(f"Marlin's kernels {'compiled' if ended else 'NOT compiled'} after {time.monotonic() - started:.0f} s")
        if not ended:
            return "its kernels were not compiled in time"
    return "no time left" if time.monotonic() - started > budget_s * 0.8 else None


def measure_variant(arguments: argparse.Namespace, variant: str, made: str | None, written: dict[str, Any]) -> None:
    """Its rows into `written`, and that onto the disk after each."""
    kind, runner = VARIANTS[variant]
    rows = written["results"].setdefault(variant, [])
    try:
        if made != kind:
            shutil.rmtree(arguments.scratch, ignore_errors=True)
            begun = time.monotonic()
            total = write_model(arguments.scratch, kind, arguments.shape, arguments.tp_slice, arguments.layers)
            written[f"{kind}_bytes"] = total
            _say(f"{kind}: {total / 1e9:.1f} GB written in {time.monotonic() - begun:.0f} s")
        for row in run_variant(arguments.scratch, runner, arguments.out / f"{variant}.log", arguments.phases):
            rows.append(row)
            _say(f"{variant}: {json.dumps(row)}")
            save(arguments.out, written)
    except (ServerDiedError, OSError, RuntimeError) as error:
        rows.append({"error": f"{type(error).__name__}: {error}"})
        _say(f"{variant}: {error}")


def save(out: Path, written: dict[str, Any]) -> None:
    (out / "throughput.json").write_text(json.dumps(written, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="glm-5.2")
    parser.add_argument("--tp-slice", type=int, choices=[1, 2, 4, 8], default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--marlin", action="store_true")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--budget-s", type=float, default=560, help="nothing new is begun with less than a fifth left")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/kvq-synthetic"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "./out")))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    compiling = [subprocess.Popen([sys.executable, "-c", code]) for code in COMPILE_MARLIN if arguments.marlin]
    results: dict[str, list[dict[str, Any]]] = {}
    written: dict[str, Any] = {
        "shape": arguments.shape, "tp_slice": arguments.tp_slice, "layers": arguments.layers,
        "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "results": results,
    }  # fmt: skip
    made = None
    for variant in [name for name in VARIANTS if arguments.marlin or name != "int4-marlin"]:
        reason = why_not(variant, compiling, started, arguments.budget_s)
        if reason is not None:
            results[variant] = [{"error": reason}]
            continue
        measure_variant(arguments, variant, made, written)
        made = VARIANTS[variant][0]
    save(arguments.out, written)
    shutil.rmtree(arguments.scratch, ignore_errors=True)
    for process in compiling:
        if process.poll() is None:
            process.kill()
    for phase in arguments.phases:
        _say("\n" + table(results, phase))


def _all_finished(processes: "Sequence[subprocess.Popen[bytes]]", deadline: float) -> bool:
    """Whether every compilation has ended well; waits for them until the deadline."""
    try:
        return all(process.wait(timeout=max(0.0, deadline - time.monotonic())) == 0 for process in processes)
    except subprocess.TimeoutExpired:
        return False


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Time of each stage of one chunk of real-size experts on a GPU, beside its floor and beside llm-compressor.

    python benchmarks/solver_stages.py [--hidden 6144] [--width 2048] [--experts 10] [--tokens 32768]

Synthetic weights and correlated BF16 activations; all figures are milliseconds per expert, the median of a few runs.
The floor of a stage is its operations over the measured rate of the unit that does them, or its bytes over the measured
bandwidth.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.experts import gated_activation
from kvq.calibration.stats import blend_hessian, gram
from kvq.quantize.factor import FACTOR_BLOCK, cholesky_in_blocks
from kvq.quantize.gptq import solve_gptq
from kvq.quantize.llmcompressor_backend import gptq_sweep
from kvq.quantize.pack import HostBlocks, pack_batch
from kvq.quantize.qparams import find_scales, from_codes, to_codes
from kvq.quantize.refine import refine
from kvq.quantize.rounding import tensor_core_products
from kvq.quantize.sweep import dampened, ldl_sweep
from kvq.quantize.types import SolverBatch
from kvq.recipes.schema import load_recipe


def timed(call: Callable[[], Any], repeats: int = 3) -> float:
    """Median milliseconds of a call on the GPU, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """Measured rates: TFLOP/s of BF16, TF32 and float32 products, GB/s of a copy."""
    size = 8192
    left = torch.randn(size, size, device="cuda")
    half = left.bfloat16()
    work = 2 * size**3 / 1e9
    rates = {"bf16": work / timed(lambda: half @ half), "fp32": work / timed(lambda: left @ left)}
    with tensor_core_products():
        rates["tf32"] = work / timed(lambda: left @ left)
    big = torch.empty(2**30, device="cuda")
    rates["GB/s"] = 2 * 4 * 2**30 / timed(lambda: big.clone()) / 1e6
    return rates


def activations(tokens: int, hidden: int) -> Tensor:
    """BF16 rows with a few strong shared directions and columns of unequal size."""
    x = torch.randn(tokens, hidden, device="cuda")
    x += torch.randn(tokens, 16, device="cuda") @ torch.randn(16, hidden, device="cuda")
    return (x * torch.rand(hidden, device="cuda").add(0.1)).bfloat16()


def matrix_stages(
    kind: str, rows: int, x_TI: Tensor, experts: int
) -> tuple[list[tuple[str, float, str, float]], float]:
    """(stage, milliseconds, unit, operations or bytes per expert) for one projection; the error against rounding."""
    recipe = load_recipe("int4")
    columns = x_TI.shape[1]
    weight = torch.randn(experts, rows, columns, device="cuda") * 0.02
    own = gram(x_TI)
    hessian = torch.stack([own / x_TI.shape[0] for _ in range(experts)])
    importance = hessian.diagonal(dim1=-2, dim2=-1)
    scale = find_scales(weight, importance, recipe)
    codes = ldl_sweep(weight, hessian, scale, recipe, recipe.dampening_frac).codes_EOI
    damped = dampened(hessian, [recipe.dampening_frac] * experts)
    square, area = float(columns) ** 2, float(rows) * columns
    stages = [
        ("Hessian", timed(lambda: gram(x_TI)), "bf16", 2 * x_TI.shape[0] * square),
        ("blend", timed(lambda: blend_hessian(own, x_TI.shape[0], own, 256.0)), "GB/s", 4 * 4 * square),
        ("scale search", timed(lambda: find_scales(weight, importance, recipe)) / experts, "GB/s", 4 * area),
        ("Cholesky", timed(lambda: cholesky_in_blocks(damped.clone(), FACTOR_BLOCK)) / experts, "fp32",
         square * columns / 3),
        ("sweep, all of it", timed(lambda: ldl_sweep(weight, hessian, scale, recipe, 0.03)) / experts, "tf32",
         area * columns),
        ("refinement", timed(lambda: refine(weight, codes, scale, damped, recipe.refinement_passes, 128)) / experts,
         "tf32", recipe.refinement_passes * 3 * area * columns),
        ("pack", timed(lambda: pack_batch(codes, scale, HostBlocks())) / experts, "GB/s", 1.5 * area),
        ("solve_gptq, whole", timed(lambda: solve_gptq(SolverBatch(weight, hessian), recipe)) / experts, "tf32",
         7 * area * columns),
        ("llm-compressor quantize_weight", timed(lambda: gptq_sweep(weight, hessian, scale, recipe, 0.03), 2) / experts,
         "fp32", (square + area) * columns),
    ]  # fmt: skip
    errors = []
    theirs = gptq_sweep(weight[:1], hessian[:1], scale[:1], recipe, 0.03)[0]
    for values in (from_codes(codes, scale)[:1], theirs, from_codes(to_codes(weight, scale), scale)[:1]):
        delta = (values - weight[:1]).double()
        errors.append(float((torch.bmm(delta, hessian[:1].double()) * delta).sum()))
    refined = refine(weight[:1], codes[:1], scale[:1], damped[:1], recipe.refinement_passes, 128)
    delta = (from_codes(*refined) - weight[:1]).double()
    errors.append(float((torch.bmm(delta, hessian[:1].double()) * delta).sum()))
    sys.stdout.write(
        f"{kind}: output error over round-to-nearest's: ours {errors[0] / errors[2]:.4f}, llm-compressor "
        f"{errors[1] / errors[2]:.4f}, ours refined {errors[3] / errors[2]:.4f}\n"
    )
    return stages, sum(row[1] for row in stages[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 6144), ("width", 2048), ("experts", 10), ("tokens", 32768)):
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    rates = ceilings()
    sys.stdout.write(f"{torch.cuda.get_device_name()}: " + ", ".join(f"{k} {v:.0f}" for k, v in rates.items()) + "\n")
    x_TH = activations(chosen.tokens, chosen.hidden)
    gate_up = (torch.randn(2 * chosen.width, chosen.hidden, device="cuda") * 0.02).bfloat16()
    x_TI = gated_activation(x_TH, gate_up)
    flop = 2 * chosen.tokens * chosen.hidden * chosen.width
    forward = [
        ("gather rows", timed(lambda: x_TH[torch.arange(chosen.tokens, device="cuda")]), "GB/s", 4.0 * x_TH.numel()),
        ("gate, up, activation", timed(lambda: gated_activation(x_TH, gate_up)), "bf16", 2.0 * flop),
        ("down", timed(lambda: x_TI @ gate_up[: chosen.width].T.contiguous().T.contiguous()), "bf16", 1.0 * flop),
    ]
    for kind, stages in (
        ("tokens", forward),
        ("gate and up", matrix_stages("gate and up", 2 * chosen.width, x_TH, chosen.experts)[0]),
        ("down", matrix_stages("down", chosen.hidden, x_TI, chosen.experts)[0]),
    ):
        for stage, took, unit, amount in stages:
            floor = amount / rates[unit] / (1e6 if unit == "GB/s" else 1e9)
            sys.stdout.write(f"{kind:12} {stage:32} {took:8.2f} ms   floor {floor:6.2f} ({unit})\n")
            sys.stdout.flush()
    sys.stdout.write(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB\n")


if __name__ == "__main__":
    main()

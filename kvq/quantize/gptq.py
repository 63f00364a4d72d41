"""GPTQ (https://arxiv.org/abs/2210.17323) over a batch of matrices: scales first, the column sweep, refinement.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups.
"""

import math

import torch
from torch import Tensor

from kvq.errors import QuantizationError
from kvq.quantize.llmcompressor_backend import gptq_sweep
from kvq.quantize.qparams import find_scales, to_codes
from kvq.quantize.refine import refine
from kvq.quantize.sweep import Swept, dampened, ldl_sweep
from kvq.quantize.types import Outcome, SolvedBatch, SolverBatch
from kvq.recipes.schema import Recipe


def solve_gptq(batch: SolverBatch, recipe: Recipe) -> SolvedBatch:
    """Codes that minimize the output error column by column under scales fixed before the sweep; then both refined.

    A Hessian that is not positive definite is tried again with ten times the dampening, `dampening_steps` times; what
    still fails is rounded to nearest and says so in its outcome. Raises QuantizationError if a result is not finite.
    """
    assert batch.hessian_EII is not None, "gptq needs Hessians"
    importance_EI = batch.hessian_EII.diagonal(dim1=-2, dim2=-1)
    scale_EOG = find_scales(batch.weight_EOI, importance_EI, recipe)
    codes_EOI, dampening = _sweep_until_solved(batch, scale_EOG, recipe)
    outcomes: list[Outcome] = ["solved" if value > 0 else "hessian_not_positive_definite" for value in dampening]
    if recipe.refinement_passes and any(dampening):
        # A slice where all were solved: no copies of large tensors.
        chosen = slice(None) if all(dampening) else [index for index, value in enumerate(dampening) if value > 0]
        hessian = dampened(batch.hessian_EII[chosen], [value for value in dampening if value > 0])
        codes_EOI[chosen], scale_EOG[chosen] = refine(
            batch.weight_EOI[chosen], codes_EOI[chosen], scale_EOG[chosen], hessian, recipe.refinement_passes,
            recipe.block_size,
        )  # fmt: skip
    return SolvedBatch(codes_EOI, scale_EOG, tuple(outcomes), tuple(dampening))


def _sweep_until_solved(batch: SolverBatch, scale_EOG: Tensor, recipe: Recipe) -> tuple[Tensor, list[float]]:
    """Codes; and for each matrix the dampening that worked, 0 where none did (its codes are rounded to nearest)."""
    assert batch.hessian_EII is not None
    trace_E = batch.hessian_EII.diagonal(dim1=-2, dim2=-1).sum(dim=-1).tolist()
    if not all(map(math.isfinite, trace_E)):
        raise QuantizationError(
            "a Hessian holds NaN or Inf: the activations are extreme. Look at the calibration data, or use "
            "--set solver=rtn."
        )
    dampening = [0.0] * len(trace_E)
    # A Hessian without any input has nothing to solve by, and no dampening helps it.
    left = [index for index, trace in enumerate(trace_E) if trace > 0]
    codes_EOI: Tensor | None = None
    for step in range(recipe.dampening_steps + 1):
        if not left:
            break
        damp = min(1.0, recipe.dampening_frac * 10.0**step)
        swept, solved = _sweep(batch, scale_EOG, left, recipe, damp)
        if all(solved) and len(left) == len(dampening):
            return swept.codes_EOI, [damp] * len(left)
        if codes_EOI is None:
            codes_EOI = to_codes(batch.weight_EOI, scale_EOG)
        for place, index in enumerate(left):
            if solved[place]:
                codes_EOI[index], dampening[index] = swept.codes_EOI[place], damp
        left = [index for place, index in enumerate(left) if not solved[place]]
    return to_codes(batch.weight_EOI, scale_EOG) if codes_EOI is None else codes_EOI, dampening


def _sweep(
    batch: SolverBatch, scale_EOG: Tensor, left: list[int], recipe: Recipe, dampening_frac: float
) -> tuple[Swept, list[bool]]:
    """Those matrices swept, and which of them were solved. The device is waited for once."""
    assert batch.hessian_EII is not None
    given = batch.weight_EOI, batch.hessian_EII, scale_EOG
    if len(left) < len(scale_EOG):
        given = given[0][left], given[1][left], given[2][left]
    swept = SWEEPS[recipe.sweep](*given, recipe, dampening_frac)
    failed, finite = torch.stack([swept.failed_E, swept.finite_E]).tolist()
    if not all(fails or fine for fails, fine in zip(failed, finite, strict=True)):
        raise QuantizationError(
            f"GPTQ gave NaN or Inf at dampening_frac {dampening_frac}; the activations or weights are extreme. "
            "Raise dampening_frac with --set, or use --set solver=rtn."
        )
    return swept, [not fails for fails in failed]


def _llmcompressor_sweep(
    weight_EOI: Tensor, hessian_EII: Tensor, scale_EOG: Tensor, recipe: Recipe, dampening_frac: float
) -> Swept:
    quantized_EOI, failed_E = gptq_sweep(weight_EOI, hessian_EII, scale_EOG, recipe, dampening_frac)
    return Swept(to_codes(quantized_EOI, scale_EOG), failed_E, torch.isfinite(quantized_EOI).flatten(1).all(dim=1))


SWEEPS = {"ldl": ldl_sweep, "llmcompressor": _llmcompressor_sweep}

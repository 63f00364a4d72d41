"""GPTQ (https://arxiv.org/abs/2210.17323) over a batch of matrices: scales first, the column sweep, refinement.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups.
"""

import torch
from torch import Tensor

from kvq.errors import QuantizationError
from kvq.quantize.llmcompressor_backend import gptq_sweep
from kvq.quantize.qparams import find_scales, to_codes
from kvq.quantize.refine import refine
from kvq.quantize.sweep import dampened, ldl_sweep
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
    codes_EOI = to_codes(batch.weight_EOI, scale_EOG)
    dampening = _sweep_until_solved(batch, codes_EOI, scale_EOG, recipe)
    outcomes: list[Outcome] = ["solved" if value > 0 else "hessian_not_positive_definite" for value in dampening]
    if recipe.refinement_passes and any(dampening):
        # A slice where all were solved: no copies of large tensors.
        chosen = torch.nonzero(torch.tensor(dampening)).flatten().tolist() if not all(dampening) else slice(None)
        hessian = dampened(batch.hessian_EII[chosen], [value for value in dampening if value > 0])
        codes_EOI[chosen], scale_EOG[chosen] = refine(
            batch.weight_EOI[chosen], codes_EOI[chosen], scale_EOG[chosen], hessian, recipe.refinement_passes,
            recipe.block_size,
        )  # fmt: skip
    return SolvedBatch(codes_EOI, scale_EOG, tuple(outcomes), tuple(dampening))


def _sweep_until_solved(batch: SolverBatch, codes_EOI: Tensor, scale_EOG: Tensor, recipe: Recipe) -> list[float]:
    """Codes in place; for each matrix the dampening that worked, 0 where none did (its codes stay rounded)."""
    count = codes_EOI.shape[0]
    dampening = [0.0] * count
    assert batch.hessian_EII is not None
    # A Hessian without any input has nothing to solve by, and no dampening helps it. (NaN goes on, and is refused.)
    open_E = torch.nonzero(~(batch.hessian_EII.diagonal(dim1=-2, dim2=-1).sum(dim=-1) <= 0)).flatten()
    for step in range(recipe.dampening_steps + 1):
        if open_E.numel() == 0:
            break
        damp = min(1.0, recipe.dampening_frac * 10.0**step)
        failed = _sweep(batch, codes_EOI, scale_EOG, open_E, recipe, damp)
        for index in open_E[~failed].tolist():
            dampening[index] = damp
        open_E = open_E[failed]
    return dampening


def _sweep(
    batch: SolverBatch, codes_EOI: Tensor, scale_EOG: Tensor, open_E: Tensor, recipe: Recipe, dampening_frac: float
) -> Tensor:
    """Solve the open matrices, write their codes in place, and give which of them failed."""
    assert batch.hessian_EII is not None
    everything = open_E.numel() == codes_EOI.shape[0]
    weight, hessian, scale = (
        value if everything else value[open_E] for value in (batch.weight_EOI, batch.hessian_EII, scale_EOG)
    )
    sweep = ldl_sweep if weight.is_cuda else gptq_sweep
    quantized, failed = sweep(weight, hessian, scale, recipe, dampening_frac)
    if not bool(torch.isfinite(quantized[~failed]).all()):
        raise QuantizationError(
            f"GPTQ gave NaN or Inf at dampening_frac {dampening_frac}; the activations or weights are extreme. "
            "Raise dampening_frac with --set, or use --set solver=rtn."
        )
    codes_EOI[open_E[~failed]] = to_codes(quantized, scale)[~failed]
    return failed

"""AWQ (https://arxiv.org/abs/2306.00978) inside each expert: scaling between up and down, clip search, rounding.

An expert gives down(silu(gate x) * (up x)): dividing row i of up by s_i and multiplying column i of down by it changes
nothing, whatever stands around the expert. down then rounds its important columns more finely, and up, whose groups lie
along its rows, rounds as before. Scaling the input of gate and up instead would have to be undone in the norm before
them, and with it in the router and the shared experts, which are not quantized here; kvq leaves all of these alone, so
that routing is what it was. The factors are powers of two: exact in every floating-point type, and readable off the
written weights.

Shape suffixes: E = experts, O = out_features, I = in_features, G = groups, C, D = columns of a group.
"""

import torch
from torch import Tensor

from kvq.quantize.qparams import CODE_MAX, CODE_MIN, HALF_RANGE, SHRINK_FACTORS, from_codes, grouped, storable, to_codes
from kvq.quantize.types import Outcome, SolvedBatch, SolverBatch
from kvq.recipes.schema import Recipe

# Exponents of the mean input size that are tried: 0 (no scaling) to 1 in steps of 0.05, as in AWQ's own code.
ALPHAS = tuple(step / 20 for step in range(21))


def solve_awq(batch: SolverBatch, recipe: Recipe) -> SolvedBatch:
    """Nearest codes under clipped scales."""
    assert batch.hessian_EII is not None, "awq needs second moments"
    scale_EOG = clip_scales(batch.weight_EOI, batch.hessian_EII, recipe.group_size)
    count = batch.weight_EOI.shape[0]
    solved: Outcome = "solved"
    return SolvedBatch(to_codes(batch.weight_EOI, scale_EOG), scale_EOG, (solved,) * count, (0.0,) * count)


def clip_scales(weight_EOI: Tensor, hessian_EII: Tensor, group_size: int) -> Tensor:
    """BF16 scales [E, O, G]: per group the shrink factor whose rounding changes the group's own output least.

    The error of a group is d M d^T, where d is the change of its weights and M the second moment of its inputs.
    """
    groups_EOGC = grouped(weight_EOI, group_size)
    moment_EGCD = _group_moments(hessian_EII, group_size)
    base_EOG = groups_EOGC.abs().amax(dim=-1) / HALF_RANGE
    best_scale, best_error = storable(base_EOG), torch.full_like(base_EOG, torch.inf)
    for factor in SHRINK_FACTORS:
        scale_EOG = storable(base_EOG * factor)
        step = scale_EOG.to(groups_EOGC.dtype).unsqueeze(-1)
        delta_EOGC = torch.round(groups_EOGC / step).clamp_(CODE_MIN, CODE_MAX).mul_(step).sub_(groups_EOGC)
        error_EOG = (torch.einsum("eogc,egcd->eogd", delta_EOGC, moment_EGCD) * delta_EOGC).sum(dim=-1)
        better = error_EOG < best_error
        best_error = torch.where(better, error_EOG, best_error)
        best_scale = torch.where(better, scale_EOG, best_scale)
    return best_scale


def _group_moments(hessian_EII: Tensor, group_size: int) -> Tensor:
    """The blocks on the diagonal: [E, G, C, C]."""
    parts = [
        hessian_EII[:, start : start + group_size, start : start + group_size]
        for start in range(0, hessian_EII.shape[-1], group_size)
    ]
    return torch.stack(parts, dim=1)


def search_smoothing(down_EOI: Tensor, hessian_EII: Tensor, group_size: int) -> Tensor:
    """Factors [E, I] for the columns of down, powers of two, that make its rounding change the output least.

    Tried are (root mean square of the column's input) ** alpha, centred at 1. Columns without input keep 1.
    """
    size_EI = hessian_EII.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    log_EI = torch.where(size_EI > 0, size_EI, torch.ones_like(size_EI)).log2()
    live_EI = size_EI > 0
    middle_E1 = (log_EI * live_EI).sum(dim=-1, keepdim=True) / live_EI.sum(dim=-1, keepdim=True).clamp(min=1)
    log_EI = (log_EI - middle_E1) * live_EI
    best_EI = torch.ones_like(size_EI)
    best_error_E = torch.full((down_EOI.shape[0],), torch.inf, device=down_EOI.device)
    for alpha in ALPHAS:
        factor_EI = torch.exp2((alpha * log_EI).round())
        error_E = _output_error(down_EOI, hessian_EII, factor_EI, group_size)
        better_E = error_E < best_error_E
        best_error_E = torch.where(better_E, error_E, best_error_E)
        best_EI = torch.where(better_E.unsqueeze(-1), factor_EI, best_EI)
    return best_EI


def _output_error(weight_EOI: Tensor, hessian_EII: Tensor, factor_EI: Tensor, group_size: int) -> Tensor:
    """Mean square change of the output when the scaled weight is rounded with unclipped scales: [E]."""
    scaled_EOI = weight_EOI * factor_EI.unsqueeze(1)
    scale_EOG = storable(grouped(scaled_EOI, group_size).abs().amax(dim=-1) / HALF_RANGE)
    delta_EOI = from_codes(to_codes(scaled_EOI, scale_EOG), scale_EOG) / factor_EI.unsqueeze(1) - weight_EOI
    return (torch.bmm(delta_EOI, hessian_EII) * delta_EOI).sum(dim=(1, 2))

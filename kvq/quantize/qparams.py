"""Scales for symmetric INT4 groups.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, C = columns of a group.
"""

import torch
from torch import Tensor

from kvq.recipes.schema import Recipe

CODE_MIN, CODE_MAX = -8, 7
# compressed-tensors' min-max scale spreads 15 steps over [-amax, amax].
HALF_RANGE = (CODE_MAX - CODE_MIN) / 2
# Shrink factors that the search tries: 1.08 down to 0.60 of the min-max scale.
SHRINK_FACTORS = tuple(1.0 - 0.02 * step for step in range(-4, 21))
# Values that a CPU tries all factors on before it goes on: they stay in its cache.
SEARCH_VALUES = 2**17


def storable(scale: Tensor) -> Tensor:
    """Rounded to BF16, as written, and never zero: an all-zero group gets scale 1."""
    rounded = scale.to(torch.bfloat16)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def grouped(weight_EOI: Tensor, group_size: int) -> Tensor:
    """View with the columns split into groups: [E, O, G, C]."""
    return weight_EOI.reshape(*weight_EOI.shape[:-1], -1, group_size)


def to_codes(weight_EOI: Tensor, scale_EOG: Tensor) -> Tensor:
    """Nearest codes, ties to even, clamped: int8."""
    groups = grouped(weight_EOI, weight_EOI.shape[-1] // scale_EOG.shape[-1])
    codes = torch.round(groups / scale_EOG.to(weight_EOI.dtype).unsqueeze(-1)).clamp_(CODE_MIN, CODE_MAX)
    return codes.flatten(-2).to(torch.int8)


def from_codes(codes_EOI: Tensor, scale_EOG: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Code times scale: what the checkpoint means, rounded once to `dtype` if that is BF16."""
    groups = grouped(codes_EOI.to(dtype), codes_EOI.shape[-1] // scale_EOG.shape[-1])
    return (groups * scale_EOG.to(dtype).unsqueeze(-1)).flatten(-2)


def find_scales(weight_EOI: Tensor, importance_EI: Tensor | None, recipe: Recipe) -> Tensor:
    """BF16 scales [E, O, G] by the recipe's `scale_search`.

    `mse` takes, per group, the shrink factor with the least sum of importance * (w - fake quantized w)^2, where the
    importance of a column is the mean square of its input (1 without data).
    """
    groups = grouped(weight_EOI, recipe.group_size)
    base_EOG = groups.abs().amax(dim=-1) / HALF_RANGE
    if recipe.scale_search == "minmax":
        return storable(base_EOG)
    if weight_EOI.is_cuda:
        from kvq.quantize import triton_kernels

        ones_EI = torch.ones(weight_EOI.shape[0], weight_EOI.shape[2], device=weight_EOI.device)
        importance_EI = ones_EI if importance_EI is None else importance_EI
        limits = (CODE_MIN, CODE_MAX)
        return triton_kernels.search_scales(weight_EOI, importance_EI, SHRINK_FACTORS, recipe.group_size, limits)
    importance = None if importance_EI is None else grouped(importance_EI.unsqueeze(1).contiguous(), recipe.group_size)
    rows = max(1, SEARCH_VALUES // max(1, weight_EOI.shape[0] * weight_EOI.shape[2]))
    parts = zip(torch.split(groups, rows, dim=1), torch.split(base_EOG, rows, dim=1), strict=True)
    return torch.cat([_search(part, base, importance) for part, base in parts], dim=1)


def _search(groups: Tensor, base_EOG: Tensor, importance: Tensor | None) -> Tensor:
    """The best of all factors for some rows of every matrix."""
    best_scale = storable(base_EOG)
    best_error = torch.full_like(base_EOG, torch.inf)
    error = torch.empty_like(groups, memory_format=torch.contiguous_format)
    for factor in SHRINK_FACTORS:
        scale = storable(base_EOG * factor)
        step = scale.to(groups.dtype).unsqueeze(-1)
        torch.div(groups, step, out=error).round_().clamp_(CODE_MIN, CODE_MAX).mul_(step).sub_(groups).square_()
        total = (error if importance is None else error.mul_(importance)).sum(dim=-1)
        better = total < best_error
        best_error = torch.where(better, total, best_error)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale

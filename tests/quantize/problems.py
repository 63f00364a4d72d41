"""Random matrices with correlated inputs, as solvers get them.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, T = tokens.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvq.quantize.types import SolverBatch
from kvq.recipes.schema import Recipe
from tests import reference

NUMERICS: dict[str, Any] = {
    "group_size": 32, "block_size": 32, "dampening_frac": 0.01, "dampening_steps": 3, "scale_search": "mse",
    "refinement_passes": 0, "hessian_blend_tokens": 64, "drift_correction": False,
}  # fmt: skip


def recipe(**changes: Any) -> Recipe:
    """The numerics that tests rely on, whatever the defaults are."""
    return Recipe.model_validate({"name": "test", **NUMERICS, **changes})


def hessian(columns: int, seed: int, num_tokens: int = 0) -> Tensor:
    """Mean of x x^T in float64: columns of very unequal size that move together; full rank unless told otherwise."""
    generator = torch.Generator().manual_seed(1000 + seed)
    noise_TI = torch.randn(num_tokens or 3 * columns, columns, generator=generator, dtype=torch.float64)
    common_TI = torch.randn(noise_TI.shape[0], 4, generator=generator, dtype=torch.float64)
    mix = torch.randn(4, columns, generator=generator, dtype=torch.float64)
    size_I = torch.rand(columns, generator=generator, dtype=torch.float64) * 3 + 0.1
    x_TI = (noise_TI + common_TI @ mix) * size_I
    return x_TI.T @ x_TI / x_TI.shape[0]


def weights(rows: int, columns: int, seed: int) -> Tensor:
    """Float64, with some rows and columns much larger than others."""
    generator = torch.Generator().manual_seed(seed)
    w_OI = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return w_OI * torch.rand(rows, 1, generator=generator, dtype=torch.float64).add(0.05) * 0.1


@cache
def _stacked(count: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    seeds = range(count)
    return (
        torch.stack([weights(rows, columns, seed) for seed in seeds]),
        torch.stack([hessian(columns, seed) for seed in seeds]),
    )


def batch(count: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> SolverBatch:
    """Matrix number n is the same in every batch of these sizes."""
    w_EOI, hessian_EII = _stacked(count, rows, columns)
    return SolverBatch(w_EOI.to(dtype, copy=True), hessian_EII.to(dtype, copy=True))


def moments(given: SolverBatch) -> Tensor:
    assert given.hessian_EII is not None
    return given.hessian_EII


def differs_only_after_ties(steps: reference.GptqSteps, codes_OI: Tensor) -> bool:
    """Whether in each row the first code that differs lay between two codes. What follows it may differ freely."""
    for row in range(codes_OI.shape[0]):
        for column in steps.order:
            if codes_OI[row, column] != steps.codes_OI[row, column]:
                if abs(float(steps.before_OI[row, column]) % 1 - 0.5) > 1e-3:
                    return False
                break
    return True

"""The GPTQ sweep, from one factorization and without an inverse.

GPTQ's column updates with the inverse Hessian's Cholesky factor give the same codes as LDLQ's feedback
(https://arxiv.org/abs/2307.13304, theorem 6): with H = (I + M) D (I + M)^T, M strictly upper triangular,

    code_k = nearest((w_k + sum over j < k of (w_j - rounded_j) M_jk) / scale_k)

M is read off the Cholesky factor of H with both axes reversed. One factorization is a third of the work of
llm-compressor's three (factor, inverse, factor), and the feedback is plain matrix products. Measured beside
llm-compressor's `quantize_weight`, on an H200: benchmarks/2026-11-30_h200_real-size-layer.md; on a CPU:
benchmarks/2026-11-30_cpu_against_oneshot.md.

Shape suffixes: E = matrices, O = out_features, I = in_features (in the order of the sweep), G = groups, B = columns of
a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.quantize.factor import FACTOR_BLOCK, cholesky_in_blocks
from kvq.quantize.rounding import round_columns
from kvq.recipes.schema import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Swept:
    """int8 codes; for each matrix whether its Hessian was not positive definite (its codes then mean nothing), and
    whether every value came out finite."""

    codes_EOI: Tensor
    failed_E: Tensor
    finite_E: Tensor


def ldl_sweep(
    weight_EOI: Tensor, hessian_EII: Tensor, scale_EOG: Tensor, recipe: Recipe, dampening_frac: float
) -> Swept:
    """All matrices, column after column. The arguments are not changed."""
    matrices, rows, columns = weight_EOI.shape
    natural_EI = torch.arange(columns, device=weight_EOI.device).expand(matrices, -1)
    diagonal_EI = hessian_EII.diagonal(dim1=-2, dim2=-1)
    order_EI = natural_EI
    if recipe.actorder == "static":
        order_EI = torch.argsort(diagonal_EI, dim=-1, descending=True, stable=True)
    reversed_EII = dampen_(_permuted(hessian_EII, order_EI.flip(-1)), [dampening_frac] * matrices)
    feedback_EII, failed_E = feedback_of(reversed_EII)
    order_EOI = order_EI.unsqueeze(1).expand(-1, rows, -1)
    group_EI = (order_EI // (columns // scale_EOG.shape[2])).to(torch.int32)
    ordered_EOI = weight_EOI.gather(2, order_EOI)
    codes_EOI, error_EOI = round_columns(ordered_EOI, ordered_EOI, scale_EOG, group_EI, feedback_EII, recipe.block_size)
    # NaN and Inf stay in a sum: no tensor of the same size is made to look for them.
    finite_E = torch.isfinite(error_EOI.sum(dim=(1, 2)))
    return Swept(torch.empty_like(codes_EOI).scatter_(2, order_EOI, codes_EOI), failed_E, finite_E)


def dampened(hessian_EII: Tensor, dampening: Sequence[float]) -> Tensor:
    """A copy with dampening times the mean diagonal added to the diagonal."""
    return dampen_(hessian_EII.clone(), dampening)


def dampen_(hessian_EII: Tensor, dampening: Sequence[float]) -> Tensor:
    """The same in place."""
    diagonal_EI = hessian_EII.diagonal(dim1=-2, dim2=-1)
    fraction_E = torch.tensor(dampening, dtype=hessian_EII.dtype, device=hessian_EII.device)
    diagonal_EI += (fraction_E * diagonal_EI.mean(dim=-1)).unsqueeze(-1)
    return hessian_EII


def _permuted(hessian_EII: Tensor, order_EI: Tensor) -> Tensor:
    """Both axes of each matrix in the given order."""
    columns = order_EI.shape[1]
    rows_EII = hessian_EII.gather(1, order_EI.unsqueeze(2).expand(-1, -1, columns))
    return rows_EII.gather(2, order_EI.unsqueeze(1).expand(-1, columns, -1))


def feedback_of(reversed_EII: Tensor) -> tuple[Tensor, Tensor]:
    """M [E, I, I] of matrices given in reversed order (changed in place), and which could not be factorized."""
    lower_EII, failed_E = cholesky_in_blocks(reversed_EII, FACTOR_BLOCK)
    upper_EII = lower_EII.flip(1, 2)
    return upper_EII.div_(upper_EII.diagonal(dim1=-2, dim2=-1).clone().unsqueeze(1)).triu_(1), failed_E

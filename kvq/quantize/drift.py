"""Correction for inputs that have drifted: a matrix is solved for the outputs that the source's inputs would give.

down reads what the quantized gate and up give, x, and should give what it gave for the source's own, x0. The weight
that does so best is W' = W (sum of x0 x^T) (sum of x x^T)^-1, a least-squares solution; GPTQ then rounds W' under the
same Hessian. (Asymmetric calibration, https://arxiv.org/abs/2504.02692, in its closed form.)

Shape suffixes: E = matrices, O = out_features, I = in_features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq.quantize.factor import FACTOR_BLOCK, cholesky_in_blocks, solve_in_blocks
from kvq.quantize.rounding import tensor_core_products
from kvq.recipes.schema import Recipe


def corrected_weight(
    weight_EOI: Tensor, drift_EII: Tensor, hessian_EII: Tensor, num_tokens: Sequence[int], recipe: Recipe
) -> Tensor:
    """W + W D (H + d 1)^-1, with D the mean of (x0 - x) x^T and H that of x x^T.

    d is (`dampening_frac` + `drift_dampening_tokens` / n) times the mean of H's diagonal for an expert with n tokens:
    the fewer tokens, the less of what they seem to say is believed. Without tokens D is zero, and so is the correction.
    """
    tokens_E = torch.tensor([max(1, n) for n in num_tokens], dtype=torch.float32, device=hessian_EII.device)
    mean_E = hessian_EII.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    ridge_E = (recipe.dampening_frac + recipe.drift_dampening_tokens / tokens_E) * mean_E
    dampened_EII = hessian_EII.clone()
    dampened_EII.diagonal(dim1=-2, dim2=-1).add_(ridge_E.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))
    # Positive definite by its making, so that the factor needs no check. Solved for D^T alone, which is square, and
    # multiplied by W after it: W has more rows, and a product is cheaper than two triangular solutions.
    factor_EII, _ = cholesky_in_blocks(dampened_EII, FACTOR_BLOCK)
    turn_EII = solve_in_blocks(factor_EII, drift_EII.mT.contiguous(), FACTOR_BLOCK)
    with tensor_core_products():
        return torch.baddbmm(weight_EOI, weight_EOI, turn_EII.mT)

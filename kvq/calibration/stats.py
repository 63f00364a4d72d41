"""Statistics of layer inputs: second moments ("Hessians"), and how an expert borrows from its layer.

Shape suffixes: T = tokens, I = in_features.
"""

import torch
from torch import Tensor

GRAM_STRIPS = 4


def cross_gram(left_TI: Tensor, right_TI: Tensor) -> Tensor:
    """Sum over tokens of left right^T in float32, [I, I]; zeros for no tokens.

    BF16 products are exact in float32, so on GPUs the tensor cores accumulate BF16 inputs into float32 directly.
    """
    if left_TI.shape[0] == 0:
        return torch.zeros(left_TI.shape[1], right_TI.shape[1], dtype=torch.float32, device=left_TI.device)
    if left_TI.is_cuda and left_TI.dtype == right_TI.dtype == torch.bfloat16:
        return torch.mm(left_TI.T, right_TI, out_dtype=torch.float32)
    return left_TI.float().T @ right_TI.float()


def gram(x_TI: Tensor) -> Tensor:
    """Sum over tokens of x x^T in float32, [I, I]; zeros for no tokens."""
    if x_TI.shape[0] and x_TI.is_cuda and x_TI.dtype == torch.bfloat16:
        return _lower_half_mirrored(x_TI)
    return cross_gram(x_TI, x_TI)


def _lower_half_mirrored(x_TI: Tensor) -> Tensor:
    """x^T x where only strips from the diagonal down are multiplied: 5/8 of the work."""
    columns = x_TI.shape[1]
    width = -(-columns // GRAM_STRIPS)
    sum_II = torch.empty(columns, columns, dtype=torch.float32, device=x_TI.device)
    for start in range(0, columns, width):
        strip = slice(start, min(start + width, columns))
        sum_II[start:, strip] = cross_gram(x_TI[:, start:], x_TI[:, strip])
    return sum_II.tril_().add_(sum_II.tril(-1).T)


def blend_hessian(
    own_sum_II: Tensor, num_tokens: int, layer_mean_II: Tensor, blend_tokens: float, out_II: Tensor | None = None
) -> Tensor:
    """An expert's mean second moment, with `blend_tokens` imaginary tokens from the layer-wide mean added.

    (sum of own + b * layer mean) / (n + b), which is (1 - w) own mean + w layer mean with w = b / (b + n): the layer's
    alone for an expert that saw nothing, the expert's own when n is large.
    """
    result_II = torch.empty_like(layer_mean_II) if out_II is None else out_II
    if num_tokens + blend_tokens == 0:
        return result_II.copy_(layer_mean_II)
    return torch.add(own_sum_II, layer_mean_II, alpha=blend_tokens, out=result_II).div_(num_tokens + blend_tokens)


def blend_weight(num_tokens: int, blend_tokens: float) -> float:
    """The layer's share w in the blend."""
    return 1.0 if num_tokens + blend_tokens == 0 else blend_tokens / (num_tokens + blend_tokens)

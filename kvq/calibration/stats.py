"""Statistics of layer inputs: second moments ("Hessians"), and how an expert borrows from its layer.

Shape suffixes: T = tokens, I = in_features.
"""

import torch
from torch import Tensor

GRAM_STRIPS = 4


def gram(x_TI: Tensor) -> Tensor:
    """Sum over tokens of x x^T in float32, [I, I]; zeros for no tokens.

    BF16 products are exact in float32, so on GPUs the tensor cores accumulate BF16 inputs into float32 directly.
    """
    if x_TI.shape[0] == 0:
        return torch.zeros(x_TI.shape[1], x_TI.shape[1], dtype=torch.float32, device=x_TI.device)
    if x_TI.is_cuda and x_TI.dtype == torch.bfloat16:
        return _lower_half_mirrored(x_TI)
    x = x_TI.float()
    return x.T @ x


def _lower_half_mirrored(x_TI: Tensor) -> Tensor:
    """x^T x where only strips from the diagonal down are multiplied: 5/8 of the work."""
    columns = x_TI.shape[1]
    width = -(-columns // GRAM_STRIPS)
    sum_II = torch.empty(columns, columns, dtype=torch.float32, device=x_TI.device)
    for start in range(0, columns, width):
        strip = slice(start, min(start + width, columns))
        sum_II[start:, strip] = torch.mm(x_TI[:, start:].T, x_TI[:, strip], out_dtype=torch.float32)
    return sum_II.tril_().add_(sum_II.tril(-1).T)


def blend_hessian(own_sum_II: Tensor, num_tokens: int, layer_mean_II: Tensor, blend_tokens: float) -> Tensor:
    """An expert's mean second moment, with `blend_tokens` imaginary tokens from the layer-wide mean added.

    (sum of own + b * layer mean) / (n + b), which is (1 - w) own mean + w layer mean with w = b / (b + n): the layer's
    alone for an expert that saw nothing, the expert's own when n is large.
    """
    if num_tokens + blend_tokens == 0:
        return layer_mean_II.clone()
    return torch.add(own_sum_II, layer_mean_II, alpha=blend_tokens).div_(num_tokens + blend_tokens)


def blend_weight(num_tokens: int, blend_tokens: float) -> float:
    """The layer's share w in the blend."""
    return 1.0 if num_tokens + blend_tokens == 0 else blend_tokens / (num_tokens + blend_tokens)

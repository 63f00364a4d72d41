"""Undoing what AWQ folds into the weights of an expert, so that written and source weights can be compared.

Row i of up is divided and column i of down multiplied by one power of two (kvq/quantize/awq.py). INT4 rounding is far
too small to hide a factor of two, so the factors are read off the weights; those of the two must be inverse.

Shape suffixes: O = out_features, I = in_features, R = rows of up, which are columns of down.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Weights = Callable[[str], tuple[Tensor, Tensor]]


def rescaled_original(weights: Weights, module: str) -> Tensor | None:
    """The source's weight as AWQ scaled it before rounding, or None if up and down of the expert were scaled apart.

    `weights` gives the written and the source's weight of a module.
    """
    expert, _, projection = module.rpartition(".")
    _, original_OI = weights(module)
    if projection == "gate_proj":
        return original_OI
    up_R = _factors(*weights(f"{expert}.up_proj"))
    down_R = _factors(*(weight.T for weight in weights(f"{expert}.down_proj")))
    if not torch.equal(up_R * down_R, torch.ones_like(up_R)):
        return None
    return original_OI * (up_R.unsqueeze(1) if projection == "up_proj" else down_R)


def _factors(written_RI: Tensor, original_RI: Tensor) -> Tensor:
    """The power of two by which each row was multiplied: [R]; 1 for rows of zeros."""
    written, original = written_RI.double(), original_RI.double()
    share_R = (written * original).sum(dim=1) / original.square().sum(dim=1)
    usable_R = torch.isfinite(share_R) & (share_R > 0)
    share_R = torch.where(usable_R, share_R, torch.ones_like(share_R))
    return torch.exp2(share_R.log2().round()).to(original_RI.dtype)

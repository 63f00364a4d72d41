"""Solved weights that a layer keeps on its device until its output is computed.

Shape suffixes: O = out_features, I = in_features, G = groups of columns, B = bytes of a row, two codes in each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvq.quantize.qparams import from_codes
from kvq.quantize.types import SolvedBatch


def kept_weight(solved: SolvedBatch, index: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Gives one matrix of a batch as it is written, as often as it is called. Half a byte is held for a weight, and its
    share of a scale: for a layer of Kimi K2 in groups of 128 8.7 GB, where codes of a byte each would be 17."""
    pairs_OB, scale_OG = pair_codes(solved.codes_EOI[index]), solved.scale_EOG[index].clone()
    return lambda: from_codes(split_pairs(pairs_OB), scale_OG, dtype)


def pair_codes(codes_OI: Tensor) -> Tensor:
    """int8 codes in [-8, 7] to bytes: of a row's left half in the low bits, of its right half in the high ones."""
    left_OB, right_OB = codes_OI.chunk(2, dim=1)
    assert left_OB.shape == right_OB.shape, f"{codes_OI.shape[1]} columns are no pairs"
    return (right_OB << 4).bitwise_or_(left_OB & 15)


def split_pairs(pairs_OB: Tensor) -> Tensor:
    """The codes again."""
    return torch.cat([(pairs_OB << 4) >> 4, pairs_OB >> 4], dim=1)

"""Codes and scales -> the tensors of a compressed-tensors `pack-quantized` module.

Shape suffixes: O = out_features, I = in_features, G = groups.
"""

import torch
from torch import Tensor

from kvq.checkpoint.packing import pack_int4


def pack_module(module: str, codes_OI: Tensor, scale_OG: Tensor) -> dict[str, Tensor]:
    """On-disk tensors by full name, on the host: `weight_packed` I32, `weight_scale` BF16, `weight_shape` I64."""
    assert scale_OG.dtype == torch.bfloat16, f"scales must be what is stored, found {scale_OG.dtype}"
    return {
        f"{module}.weight_packed": pack_int4(codes_OI).cpu(),
        f"{module}.weight_scale": scale_OG.contiguous().cpu(),
        f"{module}.weight_shape": torch.tensor(codes_OI.shape, dtype=torch.int64),
    }

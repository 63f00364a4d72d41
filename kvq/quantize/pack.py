"""Codes and scales -> the tensors of compressed-tensors `pack-quantized` modules.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, W = words of 8 codes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.checkpoint.packing import pack_int4


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """A batch of packed matrices on the host. From a GPU they are still under way until its stream is synchronized."""

    packed_EOW: Tensor
    scale_EOG: Tensor
    num_columns: int

    def module(self, name: str, index: int, rows: slice) -> dict[str, Tensor]:
        """On-disk tensors of some rows of a matrix by full name: `weight_packed` I32, `weight_scale` BF16,
        `weight_shape` I64. They are views of the batch."""
        packed_OW = self.packed_EOW[index, rows]
        return {
            f"{name}.weight_packed": packed_OW,
            f"{name}.weight_scale": self.scale_EOG[index, rows],
            f"{name}.weight_shape": torch.tensor([packed_OW.shape[0], self.num_columns], dtype=torch.int64),
        }


def pack_batch(codes_EOI: Tensor, scale_EOG: Tensor) -> PackedBatch:
    """Packs on the codes' device, then copies to the host."""
    assert scale_EOG.dtype == torch.bfloat16, f"scales must be what is stored, found {scale_EOG.dtype}"
    packed_EOW = pack_int4(codes_EOI.flatten(0, 1)).reshape(*codes_EOI.shape[:2], -1)
    return PackedBatch(_to_host(packed_EOW), _to_host(scale_EOG), codes_EOI.shape[2])


def _to_host(value: Tensor) -> Tensor:
    if not value.is_cuda:
        return value.contiguous()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)

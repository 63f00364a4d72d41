"""Codes and scales -> the tensors of compressed-tensors `pack-quantized` modules.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, W = words of 8 codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq.checkpoint.packing import pack_int4

BLOCK_BYTES = 2**28
ALIGNMENT = 64


class HostBlocks:
    """Page-locked host memory for what comes from a GPU, carved from large blocks.

    PyTorch's allocator rounds every page-locked tensor up to a power of two: a third of a layer's memory for matrices
    of GLM-5.2's size. A block is free again when nothing that was carved from it is left.
    """

    def __init__(self, *, page_locked: bool = True, block_bytes: int = BLOCK_BYTES) -> None:
        self._page_locked, self._block_bytes = page_locked, block_bytes
        self._left = torch.empty(0, dtype=torch.uint8)

    def copy(self, value: Tensor) -> Tensor:
        """The same tensor on the host, contiguous. From a GPU it is still under way until its stream is synchronized.
        What is on the host already is not copied."""
        if not value.is_cuda:
            return value.contiguous()
        return self.carve(value.shape, value.dtype).copy_(value, non_blocking=True)

    def carve(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor."""
        needed = shape.numel() * dtype.itemsize
        if needed > self._left.numel():
            size = max(needed, self._block_bytes)
            self._left = torch.empty(size, dtype=torch.uint8, pin_memory=self._page_locked)
        tensor = self._left[:needed].view(dtype).view(shape)
        self._left = self._left[-(-needed // ALIGNMENT) * ALIGNMENT :]
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """Packed matrices on the host, or on their way there."""

    packed: Sequence[Tensor]
    scale: Sequence[Tensor]
    num_columns: int

    def module(self, name: str, index: int, rows: slice) -> dict[str, Tensor]:
        """On-disk tensors of some rows of a matrix by full name: `weight_packed` I32, `weight_scale` BF16,
        `weight_shape` I64. They are views of the batch."""
        packed_OW = self.packed[index][rows]
        return {
            f"{name}.weight_packed": packed_OW,
            f"{name}.weight_scale": self.scale[index][rows],
            f"{name}.weight_shape": torch.tensor([packed_OW.shape[0], self.num_columns], dtype=torch.int64),
        }


def pack_batch(codes_EOI: Tensor, scale_EOG: Tensor, host: HostBlocks) -> PackedBatch:
    """Packs on the codes' device, then copies to the host."""
    assert scale_EOG.dtype == torch.bfloat16, f"scales must be what is stored, found {scale_EOG.dtype}"
    packed_EOW = pack_int4(codes_EOI.flatten(0, 1)).reshape(*codes_EOI.shape[:2], -1)
    return PackedBatch([*map(host.copy, packed_EOW)], [*map(host.copy, scale_EOG)], codes_EOI.shape[2])

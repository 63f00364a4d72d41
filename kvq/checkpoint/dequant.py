"""Stored weights to plain floating point.

transformers' own dequantization refuses 576 rows in 128x128 blocks and is silently wrong for 192, so this is ours:
blocks are padded, as the checkpoints' authors wrote them (576 rows have 5 rows of blocks).

Shape suffixes: O = out_features, I = in_features, P = row blocks, Q = column blocks, G = groups of columns.
"""

import torch
from torch import Tensor

from kvq.checkpoint.formats import CODES_PER_WORD, SourceFormat
from kvq.checkpoint.packing import unpack_int4
from kvq.checkpoint.reader import CheckpointReader, check_finite
from kvq.errors import CheckpointError


def dequantize_block(weight_OI: Tensor, scale_PQ: Tensor, block: tuple[int, int]) -> Tensor:
    """FP8 values times the scale of their tile, exact in float32. The last tiles may be partial."""
    rows, columns = weight_OI.shape
    scale_OQ = scale_PQ.float().repeat_interleave(block[0], dim=0)[:rows]
    scale_OI = scale_OQ.repeat_interleave(block[1], dim=1)[:, :columns]
    return weight_OI.float() * scale_OI


def dequantize_channel(weight_OI: Tensor, scale_O1: Tensor) -> Tensor:
    """FP8 values times the scale of their row, exact in float32."""
    return weight_OI.float() * scale_O1.float().reshape(-1, 1)


def dequantize_int4(codes_OI: Tensor, scale_OG: Tensor) -> Tensor:
    """INT4 codes times the scale of their group of columns, exact in float32."""
    rows, columns = codes_OI.shape
    grouped_OGC = codes_OI.float().reshape(rows, scale_OG.shape[1], columns // scale_OG.shape[1])
    return (grouped_OGC * scale_OG.float().unsqueeze(-1)).reshape(rows, columns)


def load_weight(
    reader: CheckpointReader, source: SourceFormat, module: str, device: torch.device | str = "cpu"
) -> Tensor:
    """The weight of a linear module in float32 on `device`, whatever it is stored as.

    Raises CheckpointError for missing parts, damaged values and scales that are not positive.
    """
    if f"{module}.weight_packed" in reader.index:
        packed = reader.tensor(f"{module}.weight_packed").to(device)
        scale_OG = _scale(reader, f"{module}.weight_scale").to(device)
        if not _fits(packed, scale_OG, source.group_size):
            raise CheckpointError(
                f"{reader.folder}: {module}: weight_packed {list(packed.shape)} and weight_scale "
                f"{list(scale_OG.shape)} disagree, the config says groups of {source.group_size}."
            )
        return dequantize_int4(unpack_int4(packed, packed.shape[1] * CODES_PER_WORD), scale_OG)
    name = f"{module}.weight"
    if reader.index[name].dtype != "F8_E4M3":
        return reader.tensor(name).to(device).float()
    weight = reader.tensor(name, check=False).to(device)
    scale = _scale(reader, f"{module}.{source.scale_suffix}").to(device)
    value = dequantize_channel(weight, scale) if source.block is None else dequantize_block(weight, scale, source.block)
    check_finite(reader.folder / reader.index[name].shard, name, value)
    return value


def _fits(packed_OW: Tensor, scale_OG: Tensor, group_size: int | None) -> bool:
    if packed_OW.dtype != torch.int32 or packed_OW.dim() != 2 or group_size is None:
        return False
    rows, words = packed_OW.shape
    return scale_OG.shape == (rows, words * CODES_PER_WORD // group_size) and words * CODES_PER_WORD % group_size == 0


def _scale(reader: CheckpointReader, name: str) -> Tensor:
    scale = reader.tensor(name)
    if not bool((scale > 0).all()):
        place = reader.folder / reader.index[name].shard
        raise CheckpointError(f"{place}: {name} holds a scale that is not positive; the checkpoint is damaged.")
    return scale

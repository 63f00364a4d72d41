"""INT4 codes into 32-bit words and back: compressed-tensors' own packing, the format's reference.

Shape suffixes: O = out_features, I = in_features, W = words of 8 codes.
"""

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import Tensor


def pack_int4(codes_OI: Tensor) -> Tensor:
    """int8 codes in [-8, 7] to int32 words [O, I/8]: code + 8 in four bits, lowest column in the lowest bits."""
    packed: Tensor = pack_to_int32(codes_OI, num_bits=4)
    return packed


def unpack_int4(packed_OW: Tensor, num_columns: int) -> Tensor:
    """int32 words to int8 codes [O, num_columns]."""
    shape = torch.Size((packed_OW.shape[0], num_columns))
    codes: Tensor = unpack_from_int32(packed_OW, num_bits=4, shape=shape)
    return codes

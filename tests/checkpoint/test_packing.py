"""INT4 words: the bits that SGLang and vLLM read."""

import pytest
import torch

from kvq.checkpoint.formats import CODES_PER_WORD
from kvq.checkpoint.packing import pack_int4, unpack_int4


def test_golden_word() -> None:
    codes = torch.tensor([[-8, -7, -1, 0, 1, 7, 3, -4]], dtype=torch.int8)
    packed = pack_int4(codes)
    assert packed.dtype == torch.int32 and packed.shape == (1, 1)
    assert int(packed) & 0xFFFFFFFF == 0x4BF98710


def test_golden_words_of_two_rows() -> None:
    rows = [[-8] * 8 + [7] * 8, [0] * 8 + list(range(-4, 4))]
    packed = pack_int4(torch.tensor(rows, dtype=torch.int8))
    assert [[word & 0xFFFFFFFF for word in row] for row in packed.tolist()] == [
        [0x00000000, 0xFFFFFFFF],
        [0x88888888, 0xBA987654],
    ]


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (3, 32), (5, 40), (64, 88), (2, 256)])
def test_words_hold_columns_from_the_lowest_bits_up(rows: int, columns: int) -> None:
    codes = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    packed = pack_int4(codes).tolist()
    plain = [
        [
            ((packed[row][column // CODES_PER_WORD] >> 4 * (column % CODES_PER_WORD)) & 15) - 8
            for column in range(columns)
        ]
        for row in range(rows)
    ]
    assert plain == codes.tolist()


@pytest.mark.parametrize("columns", [8, 24, 64, 136])
def test_round_trip(columns: int) -> None:
    codes = torch.randint(-8, 8, (7, columns), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    unpacked = unpack_int4(pack_int4(codes), columns)
    assert unpacked.dtype == torch.int8
    assert torch.equal(unpacked, codes)


def test_strided_codes_pack_like_contiguous_ones() -> None:
    codes = torch.randint(-8, 8, (16, 24), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    assert torch.equal(pack_int4(codes.T), pack_int4(codes.T.contiguous()))

"""Weights kept as two codes to a byte are what the codes and scales say."""

import pytest
import torch

from kvq.quantize.kept import kept_weight, pair_codes, split_pairs
from kvq.quantize.qparams import from_codes
from kvq.quantize.types import SolvedBatch


def test_every_pair_of_codes_comes_back() -> None:
    code = torch.arange(-8, 8, dtype=torch.int8)
    codes_OI = torch.cartesian_prod(code, code)
    pairs_OB = pair_codes(codes_OI)
    assert pairs_OB.shape == (256, 1) and pairs_OB.dtype == torch.int8 and len(set(pairs_OB.flatten().tolist())) == 256
    assert torch.equal(split_pairs(pairs_OB), codes_OI)


def test_columns_stay_in_their_places() -> None:
    codes_OI = torch.randint(-8, 8, (5, 64), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    assert torch.equal(split_pairs(pair_codes(codes_OI)), codes_OI)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_weight_is_what_is_written_and_holds_nothing_of_its_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    codes_EOI = torch.randint(-8, 8, (3, 4, 64), generator=generator, dtype=torch.int8)
    scale_EOG = torch.rand(3, 4, 2, generator=generator).bfloat16()
    expected_OI = from_codes(codes_EOI, scale_EOG, dtype)[1]
    weight = kept_weight(SolvedBatch(codes_EOI, scale_EOG, ("solved",) * 3, (0.01,) * 3), 1, dtype)
    codes_EOI.zero_()
    scale_EOG.zero_()
    for _ in range(2):
        assert torch.equal(weight(), expected_OI)


def test_an_odd_number_of_columns_is_refused() -> None:
    with pytest.raises(AssertionError, match="7 columns are no pairs"):
        pair_codes(torch.zeros(2, 7, dtype=torch.int8))

"""Refinement against plain searches in float64.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups.
"""

from dataclasses import dataclass
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from kvq.quantize.qparams import find_scales, to_codes
from kvq.quantize.refine import refine
from tests import reference
from tests.quantize.problems import batch, moments, recipe

COLUMNS, GROUP_SIZE = 96, 32


def started(count: int = 2, rows: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, round-to-nearest codes, scales, and a positive definite second moment."""
    given = batch(count, rows, COLUMNS)
    scale_EOG = find_scales(given.weight_EOI, None, recipe(group_size=GROUP_SIZE, scale_search="minmax"))
    damped = torch.stack([reference.damp(hessian_II, 0.01) for hessian_II in moments(given)])
    return given.weight_EOI, to_codes(given.weight_EOI, scale_EOG), scale_EOG, damped.float()


def total_error(w_EOI: Tensor, codes_EOI: Tensor, scale_EOG: Tensor, hessian_EII: Tensor) -> list[float]:
    rows = zip(w_EOI, codes_EOI, scale_EOG, hessian_EII, strict=True)
    return [reference.output_error(reference.dequantize(c, s) - w.double(), h) for w, c, s, h in rows]


def best_code(w_I: Tensor, codes_I: Tensor, scale_I: Tensor, hessian_II: Tensor, column: int) -> tuple[int, float]:
    """Of all 16 codes the one with the least error, and by which share of it the second best is worse."""
    errors = []
    for code in range(reference.CODE_MIN, reference.CODE_MAX + 1):
        tried_I = codes_I.clone()
        tried_I[column] = code
        delta_I = tried_I * scale_I - w_I
        errors.append(float(delta_I @ hessian_II @ delta_I))
    first, second = sorted(errors)[:2]
    return errors.index(first) + reference.CODE_MIN, (second - first) / first


def expect_best_scale(row: "Row", group: int, found: float) -> None:
    """The neighbours of a BF16 number are 2^-8 to 2^-7 of it away; none of them, and not the old scale, does better."""
    errors = []
    for scale in (found, float(row.scale_G[group]), found * (1 - 2**-7), found * (1 + 2**-7)):
        tried_G = row.scale_G.clone()
        tried_G[group] = scale
        delta_I = row.codes_I * tried_G.repeat_interleave(GROUP_SIZE) - row.w_I
        errors.append(float(delta_I @ row.hessian_II @ delta_I))
    assert errors[0] <= min(errors) * (1 + 1e-5)


def expect_best_code(row: "Row", column: int, found: int) -> None:
    scale_I = row.scale_G.repeat_interleave(GROUP_SIZE)
    code, lead = best_code(row.w_I, row.codes_I, scale_I, row.hessian_II, column)
    assert found == code or lead < 1e-5


@dataclass
class Row:
    """One row of one matrix in float64, as far as a pass has come."""

    w_I: Tensor
    codes_I: Tensor
    scale_G: Tensor
    hessian_II: Tensor


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_each_scale_and_each_code_is_the_best_given_all_others(block_size: int) -> None:
    """One pass: of each block the scales in turn, then the codes in turn, all else being as it is at that moment."""
    w_EOI, codes_EOI, scale_EOG, hessian_EII = started()
    found_EOI, found_EOG = refine(w_EOI, codes_EOI, scale_EOG, hessian_EII, 1, block_size)
    assert found_EOI.dtype == torch.int8 and found_EOG.dtype == torch.bfloat16
    assert not torch.equal(found_EOI, codes_EOI) and not torch.equal(found_EOG, scale_EOG)
    for matrix, out in product(range(w_EOI.shape[0]), range(w_EOI.shape[1])):
        parts = (w_EOI[matrix, out], codes_EOI[matrix, out], scale_EOG[matrix, out], hessian_EII[matrix])
        row = Row(*(part.double() for part in parts))
        for start in range(0, COLUMNS, block_size):
            stop = min(start + block_size, COLUMNS)
            for group in range(start // GROUP_SIZE, stop // GROUP_SIZE):
                found_scale = float(found_EOG[matrix, out, group])
                expect_best_scale(row, group, found_scale)
                row.scale_G[group] = found_scale
            for column in range(start, stop):
                found = int(found_EOI[matrix, out, column])
                expect_best_code(row, column, found)
                row.codes_I[column] = found


def test_passes_never_raise_the_error_and_come_to_rest() -> None:
    w_EOI, codes_EOI, scale_EOG, hessian_EII = started(3, 6)
    errors = []
    for passes in range(6):
        refined = refine(w_EOI, codes_EOI, scale_EOG, hessian_EII, passes, 32)
        errors.append(total_error(w_EOI, *refined, hessian_EII))
    for fewer, more in pairwise(errors):
        assert all(later <= earlier * (1 + 1e-6) for earlier, later in zip(fewer, more, strict=True))
    rested = refine(w_EOI, codes_EOI, scale_EOG, hessian_EII, 40, 32)
    again = refine(w_EOI, *rested, hessian_EII, 1, 32)
    assert all(torch.equal(left, right) for left, right in zip(rested, again, strict=True))


def test_nothing_is_changed_in_place() -> None:
    given = started()
    kept = [value.clone() for value in given]
    refine(*given, 2, 64)
    assert all(torch.equal(value, before) for value, before in zip(given, kept, strict=True))


def test_group_of_zeros_stays() -> None:
    w_EOI, codes_EOI, scale_EOG, hessian_EII = started()
    w_EOI[:, 1, :GROUP_SIZE], codes_EOI[:, 1, :GROUP_SIZE], scale_EOG[:, 1, 0] = 0, 0, 1
    _, found_EOG = refine(w_EOI, codes_EOI, scale_EOG, hessian_EII, 1, 32)
    assert bool((found_EOG[:, 1, 0] == 1).all())
    assert bool((found_EOG > 0).all())

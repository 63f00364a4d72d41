"""The GPU's loops against the plain ones: on a GPU where there is one, else in Triton's interpreter.

    TRITON_INTERPRET=1 python -m pytest tests/quantize/test_triton_kernels.py        (needs the package triton)

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, W = columns of a block.
"""

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from kvq.quantize.qparams import CODE_MAX, CODE_MIN, SHRINK_FACTORS, find_scales, to_codes
from kvq.quantize.refine import _Descent, refine
from kvq.quantize.rounding import Grid, round_columns
from tests import reference
from tests.quantize.problems import batch, moments, recipe

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or triton and TRITON_INTERPRET=1"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = (CODE_MIN, CODE_MAX)
ROWS = 70  # not a multiple of what a program takes


def same(left: Tensor, right: Tensor) -> float:
    return float((left.cpu() == right.cpu()).float().mean())


@pytest.mark.parametrize(("group_size", "columns"), [(32, 96), (64, 192), (128, 128)])
def test_scales(group_size: int, columns: int) -> None:
    from kvq.quantize import triton_kernels

    given = batch(2, ROWS, columns)
    given.weight_EOI[:, 3, :group_size] = 0
    importance_EI = moments(given).diagonal(dim1=-2, dim2=-1)
    expected = find_scales(given.weight_EOI, importance_EI, recipe(group_size=group_size))
    found = triton_kernels.search_scales(
        given.weight_EOI.to(DEVICE), importance_EI.to(DEVICE), SHRINK_FACTORS, group_size, LIMITS
    )
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    assert same(found, expected) > 0.99
    assert bool((found[:, 3, 0] == 1).all())


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_rounding(block_size: int) -> None:
    """Groups in any order, as the static activation order makes them; a last block that is not whole."""
    from kvq.quantize import triton_kernels

    given = batch(2, ROWS, 96)
    generator = torch.Generator().manual_seed(0)
    grid = Grid(
        find_scales(given.weight_EOI, None, recipe(group_size=32)).float(),
        torch.stack([torch.randperm(96, generator=generator) // 32 for _ in range(2)]).int(),
        torch.randn(2, 96, 96, generator=generator) * 0.05,
    )
    expected = round_columns(
        given.weight_EOI, given.weight_EOI, grid.scale_EOG, grid.group_EI, grid.feedback_EII, block_size
    )
    weight_EOI = given.weight_EOI.to(DEVICE)
    codes_EOI = torch.full(weight_EOI.shape, 99, dtype=torch.int8, device=DEVICE)
    error_EOI = torch.full(weight_EOI.shape, torch.nan, device=DEVICE)
    scale, group, feedback = (value.to(DEVICE) for value in (grid.scale_EOG, grid.group_EI, grid.feedback_EII))
    for start in range(0, 96, block_size):
        part = slice(start, min(start + block_size, 96))
        target_EOW = weight_EOI[:, :, part]
        if start:
            target_EOW = torch.baddbmm(target_EOW, error_EOI[:, :, :start], feedback[:, :start, part])
        triton_kernels.round_block(
            target_EOW, weight_EOI[:, :, part], scale, group, feedback, codes_EOI, error_EOI, start, LIMITS
        )
    assert same(codes_EOI, expected[0]) > 0.99
    settled = codes_EOI.cpu() == expected[0]
    torch.testing.assert_close(error_EOI.cpu()[settled], expected[1][settled], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("group_size", "columns", "block_size"), [(32, 96, 32), (32, 96, 128), (64, 192, 64)])
def test_refinement(group_size: int, columns: int, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvq.quantize import triton_kernels

    given = batch(2, ROWS, columns)
    scale_EOG = find_scales(given.weight_EOI, None, recipe(group_size=group_size, scale_search="minmax"))
    codes_EOI = to_codes(given.weight_EOI, scale_EOG)
    damped_EII = torch.stack([reference.damp(hessian_II, 0.01) for hessian_II in moments(given)]).float()
    started = (given.weight_EOI, codes_EOI, scale_EOG, damped_EII)
    expected = refine(*started, 2, block_size)

    def by_kernel(target: Tensor, base: Tensor, grid: Grid, codes: Tensor, error: Tensor, part: slice) -> None:
        triton_kernels.round_block(
            target, base, grid.scale_EOG, grid.group_EI, grid.feedback_EII, codes, error, part.start, LIMITS
        )

    def refit(one: _Descent, pull_EOW: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        return triton_kernels.refit_block(
            pull_EOW, one.codes_EOI, one.grid.scale_EOG, one.diagonal_EI, one.grid.feedback_EII, part.start
        )

    monkeypatch.setattr("kvq.quantize.refine.round_block", by_kernel)
    monkeypatch.setattr("kvq.quantize.refine._Descent._refit_scales", refit)
    weight, codes, scale, damped = (value.to(DEVICE) for value in started)
    found = refine(weight, codes, scale, damped, 2, block_size)
    assert same(found[0], expected[0]) > 0.98 and same(found[1], expected[1]) > 0.97
    assert same(found[0], codes_EOI) < 0.95


@pytest.mark.parametrize(("rows", "columns"), [(0, 96), (5, 96), (7, 1500)])
def test_weighted_rows_are_added(rows: int, columns: int) -> None:
    """To the rows of their tokens and to no others."""
    from kvq.quantize import triton_kernels

    generator = torch.Generator().manual_seed(0)
    output_TH = torch.randn(11, columns, generator=generator)
    token_N = torch.randperm(11, generator=generator)[:rows]
    y_NH, weight_N = torch.randn(rows, columns, generator=generator).bfloat16(), torch.rand(rows, generator=generator)
    expected_TH = output_TH.double()
    for token, y_H, weight in zip(token_N, y_NH, weight_N, strict=True):
        expected_TH[token] += y_H.double() * weight.double()
    found_TH = output_TH.to(DEVICE)
    triton_kernels.add_weighted_rows(found_TH, token_N.to(DEVICE), y_NH.to(DEVICE), weight_N.to(DEVICE))
    torch.testing.assert_close(found_TH.cpu().double(), expected_TH, rtol=1e-6, atol=1e-6)

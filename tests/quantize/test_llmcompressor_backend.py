"""The sweep equals the plain reference; "better than round to nearest" would accept most index mistakes."""

from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor

from kvq.errors import QuantizationError
from kvq.quantize.llmcompressor_backend import gptq_sweep
from kvq.quantize.qparams import find_scales, from_codes, to_codes
from tests import reference
from tests.quantize.problems import batch, differs_only_after_ties, moments, recipe

BLOCK_SIZES, GROUP_SIZES, ORDERS = (32, 64, 128, 256), (32, 64, 128), ("static", None)
SHAPES = {1: (40, 256), 3: (7, 256), 20: (1, 128)}
Order = Literal["static"] | None


@cache
def _expected(count: int, rows: int, columns: int, group_size: int, order: Order) -> tuple[Tensor, Tensor]:
    """Scales and fake-quantized weights. Does not know block sizes or batches."""
    given = batch(count, rows, columns, torch.float64)
    scale_EOG = find_scales(given.weight_EOI, None, recipe(group_size=group_size, scale_search="minmax"))
    solved = []
    for w_OI, hessian_II, scale_OG in zip(given.weight_EOI, moments(given), scale_EOG, strict=True):
        steps = reference.gptq(w_OI, hessian_II, scale_OG, 0.01, order == "static")
        solved.append(reference.dequantize(steps.codes_OI, scale_OG))
    return scale_EOG, torch.stack(solved)


def _check(count: int, rows: int, columns: int, block_size: int, group_size: int, order: Order) -> None:
    scale_EOG, expected_EOI = _expected(count, rows, columns, group_size, order)
    given = batch(count, rows, columns, torch.float64)
    settings = recipe(block_size=block_size, group_size=group_size, actorder=order)
    found_EOI, failed_E = gptq_sweep(given.weight_EOI, moments(given), scale_EOG, settings, 0.01)
    assert not failed_E.any()
    torch.testing.assert_close(found_EOI, expected_EOI, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("count", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_sweep_equals_reference(block_size: int, group_size: int, order: Order, count: int) -> None:
    _check(count, *SHAPES[count], block_size, group_size, order)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("columns", "group_size", "block_size"), [(384, 128, 256), (96, 32, 64), (32, 32, 256)])
def test_sweep_equals_reference_with_partial_blocks(
    columns: int, group_size: int, block_size: int, order: Order
) -> None:
    _check(2, 5, columns, block_size, group_size, order)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("rows", [1, 2, 17, 40])
def test_sweep_equals_reference_for_any_rows(rows: int) -> None:
    _check(2, rows, 64, 32, 32, "static")


@pytest.mark.parametrize("count", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
def test_float32_differs_only_after_ties_and_not_in_the_output(order: Order, count: int) -> None:
    given = batch(count, 12, 128)
    scale_EOG = find_scales(given.weight_EOI, None, recipe(scale_search="minmax"))
    found_EOI, _ = gptq_sweep(given.weight_EOI, moments(given), scale_EOG, recipe(actorder=order), 0.01)
    assert found_EOI.dtype == torch.float32
    codes_EOI = to_codes(found_EOI, scale_EOG)
    torch.testing.assert_close(from_codes(codes_EOI, scale_EOG), found_EOI)
    for index in range(count):
        w_OI, hessian_II, scale_OG = given.weight_EOI[index], moments(given)[index], scale_EOG[index]
        steps = reference.gptq(w_OI, hessian_II, scale_OG, 0.01, order == "static")
        assert differs_only_after_ties(steps, codes_EOI[index])
        best = reference.output_error(reference.dequantize(steps.codes_OI, scale_OG) - w_OI, hessian_II)
        assert reference.output_error(found_EOI[index] - w_OI, hessian_II) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 16])
def test_arguments_are_not_changed(order: Order, count: int) -> None:
    given = batch(count, 4, 64)
    moments(given)[0, 5], moments(given)[0, :, 5] = 0, 0
    scale_EOG = find_scales(given.weight_EOI, None, recipe())
    kept = [value.clone() for value in (given.weight_EOI, moments(given), scale_EOG)]
    gptq_sweep(given.weight_EOI, moments(given), scale_EOG, recipe(actorder=order), 0.01)
    for value, before in zip((given.weight_EOI, moments(given), scale_EOG), kept, strict=True):
        assert torch.equal(value, before)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 16])
def test_columns_without_input_are_rounded_not_zeroed(order: Order, count: int) -> None:
    given = batch(count, 6, 64)
    dead = [0, 31, 40, 63]
    moments(given)[:, dead], moments(given)[:, :, dead] = 0, 0
    scale_EOG = find_scales(given.weight_EOI, None, recipe(scale_search="minmax"))
    found_EOI, failed_E = gptq_sweep(given.weight_EOI, moments(given), scale_EOG, recipe(actorder=order), 0.01)
    assert not failed_E.any()
    # Nothing moves into a column that shares no input with the others.
    rounded_EOI = from_codes(to_codes(given.weight_EOI, scale_EOG), scale_EOG)
    assert torch.equal(found_EOI[:, :, dead], rounded_EOI[:, :, dead])
    assert bool((found_EOI[:, :, dead] != 0).any())


@pytest.mark.parametrize("count", [1, 16])
def test_zero_hessian_rounds_to_nearest(count: int) -> None:
    given = batch(count, 6, 64)
    scale_EOG = find_scales(given.weight_EOI, None, recipe())
    found_EOI, failed_E = gptq_sweep(given.weight_EOI, torch.zeros_like(moments(given)), scale_EOG, recipe(), 0.01)
    assert not failed_E.any()
    assert torch.equal(found_EOI, from_codes(to_codes(given.weight_EOI, scale_EOG), scale_EOG))


@pytest.mark.parametrize("count", [2, 16])
def test_only_the_bad_matrix_of_a_batch_fails(count: int) -> None:
    given = batch(count, 4, 64)
    scale_EOG = find_scales(given.weight_EOI, None, recipe(scale_search="minmax"))
    alone_EOI, _ = gptq_sweep(given.weight_EOI, moments(given), scale_EOG, recipe(), 0.01)
    bad = moments(given).clone()
    bad[1] = torch.eye(64) - 0.5 * torch.ones(64, 64)
    found_EOI, failed_E = gptq_sweep(given.weight_EOI, bad, scale_EOG, recipe(), 0.01)
    assert failed_E.tolist() == [index == 1 for index in range(count)]
    assert torch.equal(found_EOI[1], from_codes(to_codes(given.weight_EOI, scale_EOG), scale_EOG)[1])
    assert torch.equal(found_EOI[0], alone_EOI[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("count", [1, 16])
def test_hessian_that_is_not_finite_is_refused(bad: float, count: int) -> None:
    given = batch(count, 4, 64)
    moments(given)[0, 5, 5] = bad
    with pytest.raises(QuantizationError, match="NaN or Inf"):
        gptq_sweep(given.weight_EOI, moments(given), find_scales(given.weight_EOI, None, recipe()), recipe(), 0.01)

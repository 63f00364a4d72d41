"""Scales and codes against plain loops.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups, C = columns of a group.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvq.quantize import qparams
from kvq.quantize.qparams import find_scales, from_codes, to_codes
from tests import reference
from tests.quantize.problems import batch, moments, recipe

GROUP_SIZES = (32, 64, 128)
GroupScale = Callable[[list[float], list[float]], float]


def each_group(w_EOI: Tensor, importance_EI: Tensor | None, group_size: int, scale: GroupScale) -> Tensor:
    """What `scale` gives for every group and its importances, one after the other: [E, O, G]."""
    if importance_EI is None:
        importance_EI = torch.ones(w_EOI.shape[0], w_EOI.shape[2])
    found = [
        scale(w_C.tolist(), importance_C.tolist())
        for w_OI, importance_I in zip(w_EOI.double(), importance_EI.double(), strict=True)
        for w_I in w_OI
        for w_C, importance_C in zip(w_I.split(group_size), importance_I.split(group_size), strict=True)
    ]
    return torch.tensor(found, dtype=torch.float64).reshape(*w_EOI.shape[:2], -1)


def errors(w_EOI: Tensor, scale_EOG: Tensor, importance_EI: Tensor | None) -> Tensor:
    """The search's own measure, per group."""
    group_size = w_EOI.shape[2] // scale_EOG.shape[2]
    scales = iter(scale_EOG.double().flatten().tolist())
    return each_group(w_EOI, importance_EI, group_size, lambda w, i: reference.group_error(w, i, next(scales)))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_minmax_is_amax_over_half_the_range_in_bf16(group_size: int) -> None:
    w_EOI = batch(3, 7, 256).weight_EOI
    scale_EOG = find_scales(w_EOI, None, recipe(group_size=group_size, scale_search="minmax"))
    assert scale_EOG.dtype == torch.bfloat16
    amax_EOG = w_EOI.reshape(3, 7, -1, group_size).abs().amax(dim=-1)
    assert torch.equal(scale_EOG, (amax_EOG / 7.5).bfloat16())
    plain_EOG = each_group(w_EOI, None, group_size, lambda w, _: reference.minmax_scale(w))
    assert torch.equal(scale_EOG.double(), plain_EOG)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_mse_equals_the_plain_search(group_size: int, weighted: bool) -> None:
    given = batch(2, 4, 128)
    importance_EI = moments(given).diagonal(dim1=1, dim2=2) if weighted else None
    scale_EOG = find_scales(given.weight_EOI, importance_EI, recipe(group_size=group_size))
    plain_EOG = each_group(
        given.weight_EOI, importance_EI, group_size,
        lambda w, i: reference.mse_scale(w, i, qparams.SHRINK_FACTORS),
    )  # fmt: skip
    # Two factors may be equally good; a float32 sum then picks either.
    found_EOG, best_EOG = (errors(given.weight_EOI, scale, importance_EI) for scale in (scale_EOG, plain_EOG))
    torch.testing.assert_close(found_EOG, best_EOG, rtol=1e-5, atol=0)
    assert float((scale_EOG.double() == plain_EOG).double().mean()) > 0.95


@pytest.mark.parametrize("values", [1, 300, 1000])
def test_searching_part_by_part_changes_nothing(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    given = batch(2, 7, 128)
    importance_EI = moments(given).diagonal(dim1=1, dim2=2)
    for importance in (None, importance_EI):
        whole_EOG = find_scales(given.weight_EOI, importance, recipe())
        with monkeypatch.context() as patch:
            patch.setattr(qparams, "SEARCH_VALUES", values)
            assert torch.equal(find_scales(given.weight_EOI, importance, recipe()), whole_EOG)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_mse_is_never_worse_than_minmax(group_size: int, weighted: bool) -> None:
    given = batch(2, 6, 128)
    importance_EI = moments(given).diagonal(dim1=1, dim2=2) if weighted else None
    measured = [
        errors(given.weight_EOI, find_scales(given.weight_EOI, importance_EI, settings), importance_EI)
        for settings in (recipe(group_size=group_size, scale_search=kind) for kind in ("mse", "minmax"))
    ]
    assert bool((measured[0] <= measured[1] * (1 + 1e-5)).all())
    assert float(measured[0].sum()) < 0.99 * float(measured[1].sum())


def test_importance_moves_the_scale() -> None:
    w_EOI = torch.full((1, 1, 32), 0.3)
    w_EOI[..., 0] = 1.0
    importance_EI = torch.ones(1, 32)
    importance_EI[0, 0] = 0
    scale = float(find_scales(w_EOI, importance_EI, recipe()))
    assert errors(w_EOI, torch.tensor([[[scale]]]), importance_EI).item() < 32 * 0.3**2 * 1e-3
    assert torch.equal(importance_EI, torch.ones(1, 32).index_fill(1, torch.tensor([0]), 0))


@pytest.mark.parametrize("scale_search", ["minmax", "mse"])
@pytest.mark.parametrize("weighted", [False, True])
def test_group_of_zeros_gets_scale_one(scale_search: str, weighted: bool) -> None:
    w_EOI = batch(1, 3, 128).weight_EOI
    w_EOI[0, 1, 32:64] = 0
    importance_EI = torch.rand(1, 128, generator=torch.Generator().manual_seed(0)) if weighted else None
    scale_EOG = find_scales(w_EOI, importance_EI, recipe(scale_search=scale_search))
    assert float(scale_EOG[0, 1, 1]) == 1.0
    assert bool((to_codes(w_EOI, scale_EOG)[0, 1, 32:64] == 0).all())
    assert bool((scale_EOG[0, :, 0] < 1).all())


@pytest.mark.parametrize("scale_search", ["minmax", "mse"])
def test_unseen_columns_still_get_a_sane_scale(scale_search: str) -> None:
    w_EOI = batch(1, 3, 64).weight_EOI
    scale_EOG = find_scales(w_EOI, torch.zeros(1, 64), recipe(scale_search=scale_search))
    ratio_EOG = scale_EOG.float() / find_scales(w_EOI, None, recipe(scale_search="minmax")).float()
    assert bool(((ratio_EOG > 0.4) & (ratio_EOG < 1.2)).all())


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30])
def test_extreme_weights_keep_their_codes(size: float) -> None:
    w_EOI = batch(1, 2, 32).weight_EOI
    usual, extreme = (
        to_codes(value, find_scales(value, None, recipe(scale_search="minmax"))) for value in (w_EOI, w_EOI * size)
    )
    # BF16 keeps fewer digits near its smallest numbers.
    assert bool(((usual - extreme).abs() <= 1).all())


def test_nothing_is_changed_in_place() -> None:
    given = batch(1, 2, 64)
    kept = given.weight_EOI.clone()
    importance_EI = moments(given).diagonal(dim1=1, dim2=2).clone()
    scale_EOG = find_scales(given.weight_EOI, importance_EI, recipe())
    codes_EOI = to_codes(given.weight_EOI, scale_EOG)
    from_codes(codes_EOI, scale_EOG)
    assert torch.equal(given.weight_EOI, kept)
    assert torch.equal(importance_EI, moments(given).diagonal(dim1=1, dim2=2))


def test_codes_round_ties_to_even_and_stop_at_the_ends() -> None:
    w_OI = torch.tensor([[-9.0, -8.5, -7.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 6.5, 7.49, 7.5, 100.0, 0.0, -0.51, 3.0]])
    codes_OI = to_codes(w_OI / 4, torch.tensor([[0.25]], dtype=torch.bfloat16))
    assert codes_OI.dtype == torch.int8
    assert codes_OI.tolist() == [[-8, -8, -8, -2, -2, 0, 0, 2, 2, 6, 7, 7, 7, 0, -1, 3]]


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_codes_and_back_equal_the_reference(group_size: int) -> None:
    w_EOI = batch(2, 5, 128).weight_EOI
    scale_EOG = find_scales(w_EOI, None, recipe(group_size=group_size))
    codes_EOI = to_codes(w_EOI, scale_EOG)
    back_EOI = from_codes(codes_EOI, scale_EOG)
    assert back_EOI.dtype == torch.float32
    for w_OI, scale_OG, codes_OI, back_OI in zip(w_EOI, scale_EOG, codes_EOI, back_EOI, strict=True):
        assert torch.equal(codes_OI.double(), reference.rtn(w_OI, scale_OG))
        assert torch.equal(back_OI.double(), reference.dequantize(codes_OI, scale_OG))


def test_bf16_values_are_rounded_once() -> None:
    """Made in BF16 they are what the exact products, made in float32, round to."""
    codes_EOI = torch.arange(-8, 8, dtype=torch.int8).repeat_interleave(32).expand(2, 500, -1)
    scale_EOG = torch.rand(2, 500, 16, generator=torch.Generator().manual_seed(0)).exp().bfloat16()
    found_EOI = from_codes(codes_EOI, scale_EOG, torch.bfloat16)
    assert torch.equal(found_EOI, from_codes(codes_EOI, scale_EOG).bfloat16())
    assert not torch.equal(found_EOI.float(), from_codes(codes_EOI, scale_EOG))

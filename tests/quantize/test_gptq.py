"""solve_gptq: dampening in steps, what is recorded, and what it refuses. The sweeps themselves are tested apart.

Shape suffixes: E = matrices, O = out_features, I = in_features, G = groups.
"""

import pytest
import torch
from torch import Tensor

from kvq.errors import QuantizationError
from kvq.quantize.gptq import solve_gptq
from kvq.quantize.qparams import find_scales, from_codes, to_codes
from kvq.quantize.types import SolverBatch
from tests import reference
from tests.quantize.problems import NUMERICS, batch, differs_only_after_ties, moments, recipe

COLUMNS = 64


@pytest.fixture(autouse=True, params=["ldl", "llmcompressor"])
def sweep(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds for both."""
    monkeypatch.setitem(NUMERICS, "sweep", request.param)


def indefinite(smallest: float) -> Tensor:
    """Eigenvalue `smallest` times the mean of the diagonal, with a positive diagonal. All other eigenvalues are 1."""
    gap = (1 - smallest) / (1 - smallest / COLUMNS)
    return torch.eye(COLUMNS) - gap / COLUMNS * torch.ones(COLUMNS, COLUMNS)


def with_hessian(given: SolverBatch, index: int, hessian_II: Tensor) -> SolverBatch:
    hessian_EII = moments(given).clone()
    hessian_EII[index] = hessian_II
    return SolverBatch(given.weight_EOI, hessian_EII)


def pick(given: SolverBatch, index: int) -> SolverBatch:
    return SolverBatch(given.weight_EOI[index : index + 1], moments(given)[index : index + 1])


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("scale_search", ["minmax", "mse"])
@pytest.mark.parametrize("order", ["static", None])
def test_sweep_under_the_scales_found_equals_reference(order: str | None, scale_search: str, count: int) -> None:
    given = batch(count, 9, COLUMNS)
    solved = solve_gptq(given, recipe(actorder=order, scale_search=scale_search))
    assert solved.outcomes == ("solved",) * count
    assert solved.dampening == (0.01,) * count
    for index in range(count):
        w_OI, hessian_II, scale_OG = given.weight_EOI[index], moments(given)[index], solved.scale_EOG[index]
        steps = reference.gptq(w_OI, hessian_II, scale_OG, 0.01, order == "static")
        assert differs_only_after_ties(steps, solved.codes_EOI[index])


def test_scales_are_weighted_by_the_inputs() -> None:
    given, settings = batch(2, 9, COLUMNS), recipe()
    importance_EI = moments(given).diagonal(dim1=1, dim2=2)
    expected_EOG = find_scales(given.weight_EOI, importance_EI, settings)
    assert torch.equal(solve_gptq(given, settings).scale_EOG, expected_EOG)
    assert not torch.equal(expected_EOG, find_scales(given.weight_EOI, None, settings))


@pytest.mark.parametrize("order", ["static", None])
def test_refinement_lowers_the_error_that_the_sweep_lowers(order: str | None) -> None:
    given = batch(3, 9, COLUMNS)
    errors = []
    for passes in (0, 1, 4):
        solved = solve_gptq(given, recipe(actorder=order, refinement_passes=passes))
        deltas = from_codes(solved.codes_EOI, solved.scale_EOG) - given.weight_EOI
        pairs = zip(deltas, moments(given), strict=True)
        errors.append([reference.output_error(d, reference.damp(hessian, 0.01)) for d, hessian in pairs])
    for swept, once, often in zip(*errors, strict=True):
        assert often <= once <= swept
        assert once < swept * 0.999


def test_gives_what_is_stored() -> None:
    solved = solve_gptq(batch(2, 5, COLUMNS), recipe())
    assert (solved.codes_EOI.dtype, solved.scale_EOG.dtype) == (torch.int8, torch.bfloat16)
    assert (solved.codes_EOI.shape, solved.scale_EOG.shape) == ((2, 5, COLUMNS), (2, 5, COLUMNS // 32))
    assert int(solved.codes_EOI.min()) >= -8 and int(solved.codes_EOI.max()) <= 7
    assert bool((solved.scale_EOG > 0).all())


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("smallest", [0.5, -0.05, -0.5])
def test_arguments_are_not_changed(smallest: float, count: int) -> None:
    given = with_hessian(batch(count, 4, COLUMNS), 1, indefinite(smallest))
    kept = given.weight_EOI.clone(), moments(given).clone()
    solve_gptq(given, recipe(refinement_passes=2))
    assert torch.equal(given.weight_EOI, kept[0])
    assert torch.equal(moments(given), kept[1])


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize(("smallest", "dampening"), [(0.5, 0.01), (-0.05, 0.1), (-0.5, 1.0)])
@pytest.mark.parametrize("passes", [0, 2])
def test_dampening_rises_until_it_is_enough(smallest: float, dampening: float, count: int, passes: int) -> None:
    good = batch(count, 4, COLUMNS)
    given = with_hessian(good, 1, indefinite(smallest))
    solved = solve_gptq(given, recipe(refinement_passes=passes))
    assert solved.outcomes == ("solved",) * count
    assert solved.dampening == pytest.approx([dampening if index == 1 else 0.01 for index in range(count)])
    alone = solve_gptq(pick(given, 1), recipe(dampening_frac=dampening, dampening_steps=0, refinement_passes=passes))
    assert torch.equal(solved.codes_EOI[1], alone.codes_EOI[0])
    assert torch.equal(solved.scale_EOG[1], alone.scale_EOG[0])
    # The others are not touched by the second try.
    before = solve_gptq(good, recipe(refinement_passes=passes))
    others = [index for index in range(count) if index != 1]
    assert torch.equal(solved.codes_EOI[others], before.codes_EOI[others])


def test_dampening_steps_end_where_the_recipe_says() -> None:
    given = with_hessian(batch(2, 4, COLUMNS), 1, indefinite(-0.5))
    assert solve_gptq(given, recipe(dampening_steps=1)).outcomes == ("solved", "hessian_not_positive_definite")
    assert solve_gptq(given, recipe(dampening_steps=2)).outcomes == ("solved", "solved")


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("passes", [0, 2])
def test_hopeless_hessian_is_rounded_to_nearest_and_says_so(passes: int, count: int) -> None:
    given = with_hessian(batch(count, 4, COLUMNS), 0, indefinite(-3.0))
    solved = solve_gptq(given, recipe(refinement_passes=passes))
    assert solved.outcomes == ("hessian_not_positive_definite", *["solved"] * (count - 1))
    scale_EOG = solved.scale_EOG
    assert torch.equal(solved.codes_EOI[0], to_codes(given.weight_EOI, scale_EOG)[0])
    assert torch.equal(solved.codes_EOI[0].double(), reference.rtn(given.weight_EOI[0], scale_EOG[0]))


def test_hessian_of_few_tokens_is_solved() -> None:
    x_TI = torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(0))
    given = with_hessian(batch(2, 4, COLUMNS), 0, x_TI.T @ x_TI / 2)
    solved = solve_gptq(given, recipe())
    assert solved.outcomes == ("solved", "solved")


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize("passes", [0, 2])
def test_columns_without_input_are_not_zeroed(passes: int, count: int) -> None:
    given = batch(count, 4, COLUMNS)
    hessian_EII = moments(given)
    hessian_EII[:, 3:9], hessian_EII[:, :, 3:9] = 0, 0
    hessian_EII[1] = 0
    solved = solve_gptq(given, recipe(scale_search="minmax", refinement_passes=passes))
    assert solved.outcomes[0] == "solved"
    nearest_EOI = to_codes(given.weight_EOI, solved.scale_EOG)
    assert torch.equal(solved.codes_EOI[1], nearest_EOI[1])
    # The last scales are not the ones that the sweep had, if there is refinement.
    assert int((solved.codes_EOI - nearest_EOI)[:, :, 3:9].abs().max()) <= (passes > 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("count", [1, 16])
def test_weights_that_are_not_finite_are_refused(bad: float, count: int) -> None:
    given = batch(count, 4, COLUMNS)
    given.weight_EOI[0, 1, 2] = bad
    with pytest.raises(QuantizationError, match="NaN or Inf"):
        solve_gptq(given, recipe())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("count", [1, 16])
def test_hessian_that_is_not_finite_is_refused(bad: float, count: int) -> None:
    given = batch(count, 4, COLUMNS)
    moments(given)[0, 5, 5] = bad
    with pytest.raises(QuantizationError, match="NaN or Inf"):
        solve_gptq(given, recipe())

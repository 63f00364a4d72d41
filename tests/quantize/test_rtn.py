import pytest
import torch

from kvq.quantize.qparams import find_scales
from kvq.quantize.rtn import solve_rtn
from kvq.quantize.solvers import SOLVERS
from kvq.quantize.types import SolverBatch
from tests import reference
from tests.quantize.problems import batch, recipe


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("scale_search", ["minmax", "mse"])
def test_equals_reference(scale_search: str, group_size: int) -> None:
    given = batch(3, 5, 128)
    settings = recipe(solver="rtn", group_size=group_size, scale_search=scale_search)
    solved = solve_rtn(given, settings)
    assert torch.equal(solved.scale_EOG, find_scales(given.weight_EOI, None, settings))
    assert solved.outcomes == ("rounded",) * 3
    for w_OI, scale_OG, codes_OI in zip(given.weight_EOI, solved.scale_EOG, solved.codes_EOI, strict=True):
        assert torch.equal(codes_OI.double(), reference.rtn(w_OI, scale_OG))


def test_hessians_are_not_looked_at() -> None:
    given = batch(2, 3, 64)
    kept = given.weight_EOI.clone()
    with_data, without = (solve_rtn(SolverBatch(given.weight_EOI, h), recipe()) for h in (given.hessian_EII, None))
    assert torch.equal(with_data.codes_EOI, without.codes_EOI)
    assert torch.equal(with_data.scale_EOG, without.scale_EOG)
    assert torch.equal(given.weight_EOI, kept)


def test_every_solver_that_a_recipe_names_is_there() -> None:
    for name in ("gptq", "awq", "rtn"):
        solved = SOLVERS[name](batch(1, 2, 32), recipe(solver=name))
        assert solved.codes_EOI.shape == (1, 2, 32)

"""The sweep against the plain float64 reference of GPTQ and against llm-compressor's.

Shape suffixes: E = matrices, I = in_features.
"""

import pytest
import torch

from kvq.quantize.factor import cholesky_in_blocks, solve_in_blocks
from kvq.quantize.llmcompressor_backend import gptq_sweep
from kvq.quantize.qparams import find_scales, to_codes
from kvq.quantize.sweep import feedback_of, ldl_sweep
from tests import reference
from tests.quantize.problems import batch, differs_only_after_ties, hessian, moments, recipe


@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize(("group_size", "block_size"), [(32, 32), (32, 64), (64, 128)])
def test_equals_the_reference_of_gptq(actorder: str | None, group_size: int, block_size: int) -> None:
    given, chosen = batch(2, 5, 192), recipe(group_size=group_size, block_size=block_size, actorder=actorder)
    scale_EOG = find_scales(given.weight_EOI, None, chosen)
    swept = ldl_sweep(given.weight_EOI, moments(given), scale_EOG, chosen, 0.01)
    assert not bool(swept.failed_E.any()) and bool(swept.finite_E.all())
    for matrix in range(2):
        steps = reference.gptq(
            given.weight_EOI[matrix], moments(given)[matrix], scale_EOG[matrix], 0.01, actorder == "static"
        )
        assert differs_only_after_ties(steps, swept.codes_EOI[matrix])


def test_equals_llmcompressor() -> None:
    given, chosen = batch(3, 8, 96), recipe()
    scale_EOG = find_scales(given.weight_EOI, None, chosen)
    ours = ldl_sweep(given.weight_EOI, moments(given), scale_EOG, chosen, 0.01).codes_EOI
    theirs = to_codes(gptq_sweep(given.weight_EOI, moments(given), scale_EOG, chosen, 0.01)[0], scale_EOG)
    assert (ours == theirs).float().mean() > 0.99


@pytest.mark.parametrize("block", [8, 40, 96, 512])
def test_feedback_rebuilds_the_matrix(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """H = (I + M) D (I + M)^T, D being what is left on the diagonal."""
    monkeypatch.setattr("kvq.quantize.sweep.FACTOR_BLOCK", block)
    hessian_EII = torch.stack([hessian(96, seed) for seed in range(3)])
    feedback_EII, failed_E = feedback_of(hessian_EII.flip(1, 2))
    assert not bool(failed_E.any())
    factor_EII = feedback_EII + torch.eye(96, dtype=torch.float64)
    middle_EII = torch.linalg.solve(factor_EII, hessian_EII) @ torch.linalg.inv(factor_EII).mT
    diagonal_EI = middle_EII.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(middle_EII, torch.diag_embed(diagonal_EI), rtol=1e-8, atol=1e-8)
    assert bool((diagonal_EI > 0).all())


def test_matrix_that_is_not_positive_definite_is_named() -> None:
    hessian_EII = torch.stack([hessian(96, seed).float() for seed in range(3)])
    hessian_EII[1, 50, 50] = -1
    lower_EII, failed_E = cholesky_in_blocks(hessian_EII.clone(), 32)
    assert failed_E.tolist() == [False, True, False]
    torch.testing.assert_close(lower_EII[2].tril(), torch.linalg.cholesky(hessian_EII[2]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [8, 40, 96, 512])
def test_systems_are_solved_by_the_factor(block: int) -> None:
    """Against float64; what lies above the diagonal is not read."""
    hessian_EII = torch.stack([hessian(96, seed) for seed in range(3)])
    lower_EII = torch.linalg.cholesky(hessian_EII).float() + 7.0 * torch.ones(96, 96).triu(1)
    right_EIO = torch.randn(3, 96, 5, generator=torch.Generator().manual_seed(0))
    expected_EIO = torch.linalg.solve(hessian_EII, right_EIO.double())
    found_EIO = solve_in_blocks(lower_EII, right_EIO.clone(), block)
    error = (found_EIO.double() - expected_EIO).norm() / expected_EIO.norm()
    assert float(error) < 1e-4

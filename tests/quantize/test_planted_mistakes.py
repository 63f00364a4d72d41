"""The comparison with the reference sees the mistakes that GPTQ solvers have had, and does not see equivalent code.

Shape suffixes: O = out_features, I = in_features, G = groups of columns, B = a block of columns.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvq.quantize.qparams import find_scales
from tests import reference
from tests.quantize.problems import batch, moments, recipe

MISTAKES = (
    "damping doubled",
    "tail update dropped",
    "error at the wrong column",
    "inner update one column short",
    "no division by the diagonal",
    "wrong permutation undone",
    "permutation not undone",
    "scales of the wrong group",
    "scales in solving order",
    "ascending order",
)


@dataclass(frozen=True)
class BlockedSolver:
    """The usual way: Cholesky factor of the inverse, blocks of columns, one update of the tail a block."""

    block_size: int
    mistake: str | None = None

    def solve(self, w_OI: Tensor, hessian_II: Tensor, scale_OG: Tensor) -> Tensor:
        """Fake-quantized weights."""
        order_I = hessian_II.diagonal().argsort(descending=self.mistake != "ascending order")
        damped_II = reference.damp(hessian_II, 0.02 if self.mistake == "damping doubled" else 0.01)
        factor_II = torch.linalg.cholesky(torch.linalg.inv(damped_II[order_I][:, order_I]), upper=True)
        open_OI = w_OI[:, order_I].clone()
        for start in range(0, w_OI.shape[1], self.block_size):
            stop = min(start + self.block_size, w_OI.shape[1])
            scale_OB = self._scales(scale_OG, order_I, range(start, stop))
            error_OB = self._block(open_OI[:, start:stop], factor_II[start:stop, start:stop], scale_OB)
            if self.mistake != "tail update dropped":
                open_OI[:, stop:] -= error_OB @ factor_II[start:stop, stop:]
        if self.mistake == "permutation not undone":
            return open_OI
        return open_OI[:, order_I if self.mistake == "wrong permutation undone" else order_I.argsort()]

    def _scales(self, scale_OG: Tensor, order_I: Tensor, columns: range) -> Tensor:
        size = order_I.numel() // scale_OG.shape[1]
        group_B = order_I[columns.start : columns.stop] // size
        if self.mistake == "scales in solving order":
            group_B = torch.tensor(columns) // size
        if self.mistake == "scales of the wrong group":
            group_B = (group_B + 1) % scale_OG.shape[1]
        return scale_OG[:, group_B].double()

    def _block(self, open_OB: Tensor, factor_BB: Tensor, scale_OB: Tensor) -> Tensor:
        """Quantizes `open_OB` in place and gives the errors, divided by the diagonal."""
        error_OB = torch.zeros_like(open_OB)
        width = open_OB.shape[1]
        for column in range(width):
            scale_O = scale_OB[:, column]
            code_O = (open_OB[:, column] / scale_O).round().clamp(reference.CODE_MIN, reference.CODE_MAX)
            error_O = open_OB[:, column] - code_O * scale_O
            if self.mistake != "no division by the diagonal":
                error_O = error_O / factor_BB[column, column]
            stop = width - (self.mistake == "inner update one column short")
            open_OB[:, column:stop] -= torch.outer(error_O, factor_BB[column, column:stop])
            open_OB[:, column] = code_O * scale_O
            place = (column + 1) % width if self.mistake == "error at the wrong column" else column
            error_OB[:, place] = error_O
        return error_OB


def _difference(solver: BlockedSolver) -> float:
    given = batch(1, 8, 128, torch.float64)
    w_OI, hessian_II = given.weight_EOI[0], moments(given)[0]
    scale_OG = find_scales(given.weight_EOI, None, recipe(scale_search="minmax"))[0]
    steps = reference.gptq(w_OI, hessian_II, scale_OG, 0.01, static_order=True)
    expected_OI = reference.dequantize(steps.codes_OI, scale_OG)
    return float((solver.solve(w_OI, hessian_II, scale_OG) - expected_OI).abs().max())


@pytest.mark.parametrize("block_size", [1, 32, 48, 128])
def test_equivalent_code_is_equal(block_size: int) -> None:
    assert _difference(BlockedSolver(block_size)) < 1e-10


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_seen(mistake: str) -> None:
    assert _difference(BlockedSolver(32, mistake)) > 1e-3

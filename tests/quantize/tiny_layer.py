"""A layer of six random experts with a routing made by hand: experts with no, one and two tokens, and busy ones.

Shape suffixes: T = tokens, H = hidden size, I = expert width, J = 2 I, E = experts, K = experts per token, C = columns,
O = rows of a projection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvq.calibration.experts import sort_by_expert
from kvq.quantize import experts as experts_module
from kvq.quantize.capture import Capture
from kvq.quantize.chunks import expert_chunks
from kvq.quantize.experts import LayerSolver, SolvedLayer
from kvq.quantize.gptq import solve_gptq
from kvq.quantize.types import SolvedBatch, SolverBatch
from kvq.ranks import Ranks
from kvq.recipes.schema import Recipe
from tests import reference

NUM_EXPERTS, HIDDEN, INTER = 6, 96, 64
NOBODY, ONE, TWO = 3, 0, 5
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _choices() -> list[list[int]]:
    busy = [[1, 2], [2, 4], [4, 1]] * 9
    return [[1, ONE], *busy[:10], [TWO, 2], *busy[10:20], [4, TWO], *busy[20:]]


@dataclass(frozen=True, eq=False)
class TinyLayer:
    """Is its own expert source."""

    gate_up_EJH: Tensor
    down_EHI: Tensor
    x_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    asked: list[range] = field(default_factory=list)

    def expert_gate_up(self, layer: int, experts: range) -> Tensor:
        assert layer == 7
        self.asked.append(experts)
        return self.gate_up_EJH[experts.start : experts.stop].clone()

    def expert_down(self, layer: int, experts: range) -> Tensor:
        assert layer == 7
        return self.down_EHI[experts.start : experts.stop].clone()

    def read_ahead(self, layer: int, experts: range, projections: Sequence[str]) -> None:
        assert layer == 7

    def tokens(self, expert: int) -> Tensor:
        """[T, H] of the tokens routed to an expert."""
        return self.x_TH[(self.expert_TK == expert).any(dim=1)]

    def forward(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
        return reference.moe_forward(self.x_TH, self.expert_TK, self.weight_TK, gate_up_EJH, down_EHI)

    def capture(self) -> Capture:
        return Capture.of(self.x_TH, sort_by_expert(self.expert_TK, self.weight_TK, NUM_EXPERTS), Ranks())

    def solve(self, recipe: Recipe, with_data: bool = True) -> SolvedLayer:
        return self.solver(recipe, self.capture() if with_data else None).solve()

    def solver(self, recipe: Recipe, capture: Capture | None) -> LayerSolver:
        return LayerSolver(
            self, recipe, 7, NUM_EXPERTS, expert_chunks(range(NUM_EXPERTS), NUM_EXPERTS, "cpu", 2 * INTER, HIDDEN),
            lambda expert, projection: f"e{expert}.{projection}",
            torch.device("cpu"), capture, lambda text: None,
        )  # fmt: skip


def tiny_layer() -> TinyLayer:
    generator = torch.Generator().manual_seed(5)
    expert_TK = torch.tensor(_choices())
    x_TH = torch.randn(expert_TK.shape[0], HIDDEN, generator=generator) * torch.linspace(0.2, 2, HIDDEN)
    return TinyLayer(
        torch.randn(NUM_EXPERTS, 2 * INTER, HIDDEN, generator=generator) * 0.1,
        torch.randn(NUM_EXPERTS, HIDDEN, INTER, generator=generator) * 0.1,
        x_TH,
        expert_TK,
        torch.rand(expert_TK.shape, generator=generator) + 0.2,
    )


@dataclass(eq=False)
class SpySolver:
    """Solves as gptq does and keeps what it was given and what it gave."""

    calls: list[tuple[SolverBatch, SolvedBatch]] = field(default_factory=list)

    def __call__(self, given: SolverBatch, recipe: Recipe) -> SolvedBatch:
        solved = solve_gptq(given, recipe)
        self.calls.append((given, solved))
        return solved

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(experts_module, "SOLVERS", {"gptq": self})

    def hessians(self, rows: int) -> Tensor:
        """[E, C, C] over all chunks, of the batches whose matrices have so many rows."""
        found = [given.hessian_EII for given, _ in self.calls if given.weight_EOI.shape[1] == rows]
        return torch.cat([hessian for hessian in found if hessian is not None])


def written_weight(tensors: Mapping[str, Tensor], expert: int, projection: str) -> Tensor:
    """What the written tensors of a matrix mean: [O, C]."""
    name = f"e{expert}.{projection}.weight"
    codes_OI = reference.unpack(tensors[f"{name}_packed"])
    assert tensors[f"{name}_shape"].tolist() == list(codes_OI.shape)
    return reference.dequantize(codes_OI, tensors[f"{name}_scale"])


def written_gate_up(tensors: Mapping[str, Tensor]) -> Tensor:
    """[E, J, H] in float64."""
    pairs = [[written_weight(tensors, expert, p) for p in PROJECTIONS[:2]] for expert in range(NUM_EXPERTS)]
    return torch.stack([torch.cat(pair) for pair in pairs])


def written_down(tensors: Mapping[str, Tensor]) -> Tensor:
    """[E, H, I] in float64."""
    return torch.stack([written_weight(tensors, expert, "down_proj") for expert in range(NUM_EXPERTS)])


def expected_moments(inputs: list[Tensor], mean_CC: Tensor, blend_tokens: float) -> Tensor:
    """Blended Hessians of all experts from their inputs [T, C]: [E, C, C]."""
    return torch.stack([reference.blend(x_TC, mean_CC, blend_tokens) for x_TC in inputs])

"""Routed experts as kvq runs them: grouped by expert on the tokens that the router sends them.

Shape suffixes: T = tokens, H = hidden size, I = expert width, K = experts per token, E = experts,
R = routed rows (T x K).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which tokens go to which expert: rows sorted by expert, `start[e] : start[e + 1]` are expert e's."""

    token_R: Tensor
    weight_R: Tensor
    start: list[int]

    def rows(self, expert: int) -> slice:
        return slice(self.start[expert], self.start[expert + 1])

    def count(self, expert: int) -> int:
        return self.start[expert + 1] - self.start[expert]


def sort_by_expert(expert_TK: Tensor, weight_TK: Tensor, num_experts: int) -> Routing:
    """Group the router's choices by expert; tokens keep their order within an expert."""
    flat_R = expert_TK.reshape(-1)
    order_R = torch.argsort(flat_R, stable=True)
    counts = torch.bincount(flat_R, minlength=num_experts).tolist()
    start = [0]
    for count in counts:
        start.append(start[-1] + int(count))
    return Routing(order_R // expert_TK.shape[1], weight_TK.reshape(-1)[order_R], start)


def gated_activation(x_TH: Tensor, gate_up_JH: Tensor) -> Tensor:
    """silu(gate) * up, the input of down_proj. `gate_up_JH` holds the rows of gate, then those of up (J = 2 I)."""
    gate_TI, up_TI = F.linear(x_TH, gate_up_JH).chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


class RoutingRecorder(nn.Module):
    """Stands in for the experts during calibration: keeps input and routing of each batch and gives zeros, so that the
    layer around it runs unchanged and the experts' part is added when they have been solved."""

    def __init__(self) -> None:
        super().__init__()
        self.x_TH: list[Tensor] = []
        self.expert_TK: list[Tensor] = []
        self.weight_TK: list[Tensor] = []

    def forward(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        self.x_TH.append(x_TH)
        self.expert_TK.append(expert_TK)
        self.weight_TK.append(weight_TK)
        return torch.zeros_like(x_TH)


class RoutedExperts(nn.Module):
    """Experts with weights, for evaluation. Weights are plain attributes: they are not part of the layer's state.

    `observe` is told the expert, its inputs, their routing weights as a column, and what it adds to the output.
    """

    def __init__(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> None:
        super().__init__()
        self._gate_up_EJH = gate_up_EJH
        self._down_EHI = down_EHI
        self.observe: Callable[[int, Tensor, Tensor, Tensor], None] | None = None

    def weighted_output(self, expert: int, x_TH: Tensor, weight_T1: Tensor) -> Tensor:
        """One expert's output for its tokens, times their routing weights."""
        hidden_TI = gated_activation(x_TH, self._gate_up_EJH[expert])
        return F.linear(hidden_TI, self._down_EHI[expert]) * weight_T1

    def forward(self, x_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        routing = sort_by_expert(expert_TK, weight_TK, self._down_EHI.shape[0])
        out_TH = torch.zeros_like(x_TH)
        for expert, token, weight in busy_experts(routing):
            added_TH = self.weighted_output(expert, x_TH[token], weight)
            out_TH.index_add_(0, token, added_TH.to(out_TH.dtype))
            if self.observe is not None:
                self.observe(expert, x_TH[token], weight, added_TH)
        return out_TH


def busy_experts(routing: Routing) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Experts with tokens: index, token rows, and their routing weights as a column."""
    for expert in range(len(routing.start) - 1):
        if routing.count(expert):
            rows = routing.rows(expert)
            yield expert, routing.token_R[rows], routing.weight_R[rows].unsqueeze(-1)

"""What the router sent where during calibration, and how the tokens of an expert come together from all ranks.

Each rank runs its own sequences, and solves its own experts on everybody's tokens. Ranks own equally many experts and
go through them in step: while a rank asks for tokens of its i-th expert, it gives those that the others' i-th experts
need.

Shape suffixes: T = tokens of this rank, N = tokens of an expert, H = hidden size, C = columns.
"""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from kvq.calibration.experts import Routing
from kvq.calibration.stats import gram
from kvq.ranks import Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """Inputs of this rank's tokens, and the rows of each expert; `counts` has every rank's tokens of every expert."""

    x_TH: Tensor
    routing: Routing
    ranks: Ranks = field(default_factory=Ranks)
    counts: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, x_TH: Tensor, routing: Routing, ranks: Ranks) -> Self:
        """Tells the other ranks how many tokens each expert has here."""
        own = tuple(routing.count(expert) for expert in range(len(routing.start) - 1))
        return cls(x_TH, routing, ranks, tuple(ranks.gather(own)))

    def count(self, expert: int) -> int:
        """Tokens of an expert, from all ranks."""
        return sum(row[expert] for row in self.counts)

    @property
    def num_rows(self) -> int:
        """Token-expert pairs of all ranks."""
        return sum(map(sum, self.counts))

    def layer_mean(self) -> Tensor:
        """Mean second moment of the layer's tokens, [H, H]."""
        num_tokens = sum(self.ranks.gather(self.x_TH.shape[0]))
        return self.ranks.total(gram(self.x_TH)) / num_tokens

    def tokens(self, expert: int) -> Tensor:
        """[N, H], in the order of the ranks and, within one, of its tokens."""
        asked = self._in_step(expert)
        mine = torch.cat([self.routing.token_R[self.routing.rows(one)] for one in asked])
        return self.ranks.exchange(self.x_TH[mine], *self._traffic(expert, asked))

    def add_output(self, output_TH: Tensor, expert: int, y_NH: Tensor) -> None:
        """Add an expert's outputs, weighted by the router, to those of the tokens that they belong to."""
        asked = self._in_step(expert)
        sent, received = self._traffic(expert, asked)
        own = self.ranks.exchange(y_NH, received, sent)
        for one, y_TH in zip(asked, torch.split(own, sent), strict=True):
            rows = self.routing.rows(one)
            token_T, weight_T1 = self.routing.token_R[rows], self.routing.weight_R[rows].float().unsqueeze(-1)
            # A token goes to an expert once: a sum without collisions, where `index_add_` would use slow atomics.
            output_TH[token_T] = (y_TH.float() * weight_T1).add_(output_TH[token_T])

    def _in_step(self, expert: int) -> list[int]:
        """The expert that each rank is at when this rank is at `expert`."""
        num_experts = len(self.routing.start) - 1
        place = expert - self.ranks.own(num_experts).start
        return [self.ranks.own(num_experts, rank).start + place for rank in range(self.ranks.size)]

    def _traffic(self, expert: int, asked: list[int]) -> tuple[list[int], list[int]]:
        """Rows that go to each rank when tokens are asked for, and rows that come."""
        return [self.routing.count(one) for one in asked], [row[expert] for row in self.counts]

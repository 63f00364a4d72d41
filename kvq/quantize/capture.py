"""What the router sent where during calibration, and how the tokens of an expert come together from all ranks.

Each rank runs its own sequences, and solves its own experts on everybody's tokens. Ranks go through their experts in
step: while a rank asks for tokens of its i-th expert, it gives those that the others' i-th experts need. Where experts
cannot be shared evenly, some ranks own one fewer; they give for a last time and ask for nothing.

Shape suffixes: T = tokens of this rank, N = tokens of an expert, H = hidden size, C = columns.
"""

from collections.abc import Callable, Iterator
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
    def own(self) -> range:
        """The experts of this rank."""
        return self._shares()[self.ranks.rank]

    @property
    def num_rows(self) -> int:
        """Token-expert pairs of all ranks."""
        return sum(map(sum, self.counts))

    def layer_mean(self) -> Tensor:
        """Mean second moment of the layer's tokens, [H, H]."""
        num_tokens = sum(self.ranks.gather(self.x_TH.shape[0]))
        return self.ranks.total(gram(self.x_TH)) / num_tokens

    def tokens(self, experts: range) -> Iterator[Tensor]:
        """[N, H] of each of these experts of this rank, in the order of the ranks and, within one, of its tokens.

        To be gone through to its end (`zip(strict=True)` does): there a rank that owns one fewer gives for a last time.
        """
        for expert in experts:
            yield self._fetch(expert)
        if self._gives_once_more(experts):
            self._fetch(None)

    def most_tokens(self) -> list[int]:
        """Of each place in the ranks' own experts, the tokens of the rank that has most there."""
        shares = self._shares()
        places = range(max(map(len, shares)))
        return [max(self.count(share[place]) for share in shares if place < len(share)) for place in places]

    def add_outputs(
        self, output_TH: Tensor, experts: range, output_of: Callable[[int, Tensor | None], Tensor], num_kept: int
    ) -> None:
        """Add what these experts make of their tokens, weighted by the router, to the outputs of those tokens.

        The first `num_kept` experts of each rank are not given their tokens.
        """
        for expert in experts:
            tokens_NH = None if self.own.index(expert) < num_kept else self._fetch(expert)
            self._add_output(output_TH, expert, output_of(expert, tokens_NH))
        if self._gives_once_more(experts):
            if len(self.own) >= num_kept:
                self._fetch(None)
            self._add_output(output_TH, None, self.x_TH[:0])

    def _fetch(self, expert: int | None) -> Tensor:
        asked = self._in_step(expert)
        mine = torch.cat([self.routing.token_R[self.routing.rows(one)] for one in asked if one is not None])
        return self.ranks.exchange(self.x_TH[mine], *self._traffic(expert, asked))

    def _add_output(self, output_TH: Tensor, expert: int | None, y_NH: Tensor) -> None:
        asked = self._in_step(expert)
        sent, received = self._traffic(expert, asked)
        own = self.ranks.exchange(y_NH, received, sent)
        for one, y_TH in zip(asked, torch.split(own, sent), strict=True):
            if one is None:
                continue
            rows = self.routing.rows(one)
            add_weighted_rows(output_TH, self.routing.token_R[rows], y_TH, self.routing.weight_R[rows].float())

    def _shares(self) -> list[range]:
        """The experts of each rank."""
        num_experts = len(self.routing.start) - 1
        return [self.ranks.own(num_experts, rank) for rank in range(self.ranks.size)]

    def _gives_once_more(self, experts: range) -> bool:
        """Whether these are this rank's last, and others have one more."""
        shares = self._shares()
        own = shares[self.ranks.rank]
        return experts.stop == own.stop and len(own) < max(map(len, shares))

    def _in_step(self, expert: int | None) -> list[int | None]:
        """The expert that each rank is at when this rank is at `expert`; None for a rank that has no more."""
        shares = self._shares()
        own = shares[self.ranks.rank]
        place = len(own) if expert is None else own.index(expert)
        return [share[place] if place < len(share) else None for share in shares]

    def _traffic(self, expert: int | None, asked: list[int | None]) -> tuple[list[int], list[int]]:
        """Rows that go to each rank when tokens are asked for, and rows that come."""
        sent = [0 if one is None else self.routing.count(one) for one in asked]
        return sent, [0 if expert is None else row[expert] for row in self.counts]


def add_weighted_rows(output_TH: Tensor, token_N: Tensor, y_NH: Tensor, weight_N: Tensor) -> None:
    """Add each row of y, times its weight, to the float32 row of its token. No token may come twice."""
    if output_TH.is_cuda:
        from kvq.quantize import triton_kernels

        triton_kernels.add_weighted_rows(output_TH, token_N, y_NH, weight_N)
        return
    # Without collisions, so that this is a sum; `index_add_` would be slower.
    output_TH[token_N] = (y_NH.float() * weight_N.unsqueeze(-1)).add_(output_TH[token_N])

"""A model that is arithmetic: what it caches for a token depends on all tokens before it, read from the cache.

The cell of a token is a hash of the whole prefix up to it, made from the cell before, which is read through the page
table. The next token is a hash of all cells of the row, each weighted by its position. So one wrong page anywhere in a
row gives a wrong token, and what the right token is can be said without an engine: `expected_tokens`. Chunks, prefix
hits and batches make no difference, as in exact arithmetic.

Shape suffixes: B = requests of a batch, S = positions of a row, T = tokens, N = cells of the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 2**30  # so that a wrong hash is a wrong token
MAX_TOKENS = 4096
_MASK = 2**64 - 1
_STEP, _TOKEN, _PLACE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9
_STEP_BACK = pow(_STEP, -1, 2**64)


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says after this prompt, computed with Python's integers."""
    cell = total = 0
    tokens: list[int] = []
    for place, token in enumerate(prompt):
        cell, total = _next(cell, total, place, token)
    for place in range(len(prompt), len(prompt) + count):
        tokens.append(_said(total))
        cell, total = _next(cell, total, place, tokens[-1])
    return tokens


def _next(cell: int, total: int, place: int, token: int) -> tuple[int, int]:
    cell = (cell * _STEP + (token + 1) * _TOKEN) & _MASK
    return cell, (total + cell * _weight(place)) & _MASK


def _weight(place: int) -> int:
    return (2 * place + 1) * _PLACE & _MASK


def _said(total: int) -> int:
    return ((total >> 33) ^ (total >> 7)) % VOCABULARY


def _signed(values: list[int]) -> Tensor:
    return torch.tensor([value - 2**64 if value >= 2**63 else value for value in values], dtype=torch.int64)


WEIGHT_S = _signed([_weight(place) for place in range(MAX_TOKENS)])
STEP_S = _signed([pow(_STEP, place, 2**64) for place in range(MAX_TOKENS + 1)])
STEP_BACK_S = _signed([pow(_STEP_BACK, place, 2**64) for place in range(MAX_TOKENS + 1)])


@dataclass
class HashModel:
    """On a KV pool of SGLang's: the first 8 bytes of a token's place in the first layer are its cell."""

    pool: Any
    slots_RS: Tensor
    steps: int = 0
    cells_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        buffer = self.pool.k_buffer[0] if hasattr(self.pool, "k_buffer") else self.pool.kv_buffer[0]
        self.cells_N = buffer.flatten(1).view(torch.int64)[:, 0]

    def forward(self, batch: Any) -> Tensor:
        """The next token of each request; the cells of the new tokens are written where the batch says."""
        self.steps += 1
        lens_B = batch.seq_lens
        rows_B = batch.req_pool_indices
        extends = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(batch.reqs)
        cells_T = torch.empty(len(batch.input_ids), dtype=torch.int64)
        at = 0
        for row, end, count in zip(rows_B.tolist(), lens_B.tolist(), extends, strict=True):
            start = end - count
            before = self.cells_N[self.slots_RS[row, start - 1].long()] if start else torch.tensor(0)
            tokens_S = (batch.input_ids[at : at + count] + 1) * (_TOKEN - 2**64)
            summed_S = (tokens_S * STEP_BACK_S[1 : count + 1]).cumsum(0)
            cells_T[at : at + count] = (summed_S + before) * STEP_S[1 : count + 1]
            at += count
        self.cells_N[batch.out_cache_loc] = cells_T
        return self._say(rows_B, lens_B)

    def _say(self, rows_B: Tensor, lens_B: Tensor) -> Tensor:
        longest = int(lens_B.max())
        cells_BS = self.cells_N[self.slots_RS[rows_B, :longest].long()]
        used_BS = torch.arange(longest) < lens_B[:, None]
        total_B = (cells_BS * WEIGHT_S[:longest] * used_BS).sum(1)
        # Shifts of a signed number keep its sign; the mask makes them those of an unsigned one.
        high_B, low_B = (total_B >> 33) & (2**31 - 1), (total_B >> 7) & (2**57 - 1)
        return (high_B ^ low_B) % VOCABULARY

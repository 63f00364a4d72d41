"""A sparse-attention indexer on sequences of any length, in bounded memory.

transformers' indexer multiplies [B, S, heads, D] by [B, 1, D, T], for which torch copies the keys once for every
position: 34 GB for one sequence of 8,192 tokens with keys of 128. Given a block of queries and the keys up to its end,
it is the same code, and the copy is as small as the block.

Shape suffixes: B = sequences of a batch, S = tokens per sequence, Q = tokens of a block, T = keys up to its end,
H = hidden size, R = query rank, D = width of a key, K = positions selected.
"""

from typing import Any

import torch
from torch import Tensor, nn

FLOAT_BYTES = 4
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}


class SelectAll(nn.Module):
    """Stands in for an indexer when the sequence has no more positions than it selects.

    The result is the same, and the scores ([S, heads, S] with a copy of the keys for every position) are never made.
    """

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self.indexer = indexer

    def forward(self, hidden_BSH: Tensor, *_: object, **__: object) -> Tensor:
        size, length = hidden_BSH.shape[:2]
        return torch.arange(length, dtype=torch.int32, device=hidden_BSH.device).expand(size, length, length)


class KeyCache:
    """What transformers' indexer asks of a cache: keep the keys of a block, give those of all blocks so far."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []

    def update_indexer(self, key_BQD: Tensor, layer: int) -> Tensor:
        self._keys.append(key_BQD)
        return torch.cat(self._keys, dim=1)


class BlockwiseIndexer(nn.Module):
    """Runs an indexer block by block over the queries; the selection is the same."""

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self.indexer = indexer

    def forward(
        self,
        hidden_BSH: Tensor,
        query_BSR: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask_BSS: Tensor,
        position_ids: Any,
        past_key_values: None = None,
    ) -> Tensor:
        """The positions that each query reads: [B, S, K], int32. `mask_BSS` must be causal and boolean."""
        assert past_key_values is None and mask_BSS.dtype == torch.bool, "calibration runs whole sequences"
        size, length = hidden_BSH.shape[:2]
        wanted, cache = min(self.indexer.index_topk, length), KeyCache()
        copies = FLOAT_BYTES * size * self.indexer.head_dim * length
        step = max(1, COPY_BYTES[hidden_BSH.device.type] // copies)
        blocks = []
        for start in range(0, length, step):
            part = slice(start, min(start + step, length))
            found_BQK = self.indexer(
                hidden_BSH[:, part],
                query_BSR[:, part],
                (rotary[0][:, part], rotary[1][:, part]),
                mask_BSS[:, part, : part.stop],
                position_ids,
                past_key_values=cache,
            )
            blocks.append(_widened(found_BQK, wanted))
        return torch.cat(blocks, dim=1)


def fit_indexer(attention: Any, length: int) -> None:
    """Replace an attention module's indexer by what gives the same selection for sequences of this length.

    Modules that share the selection of an earlier layer have none.
    """
    indexer = attention.indexer
    if isinstance(indexer, SelectAll | BlockwiseIndexer):
        indexer = indexer.indexer
    if indexer is not None:
        attention.indexer = (SelectAll if length <= indexer.index_topk else BlockwiseIndexer)(indexer)


def _widened(found_BQK: Tensor, wanted: int) -> Tensor:
    """An early block has fewer keys than are selected: it takes all of them, and positions after it, which the causal
    mask hides in any case."""
    have = found_BQK.shape[-1]
    if have == wanted:
        return found_BQK
    later_K = torch.arange(have, wanted, dtype=found_BQK.dtype, device=found_BQK.device)
    return torch.cat([found_BQK, later_K.expand(*found_BQK.shape[:-1], -1)], dim=-1)

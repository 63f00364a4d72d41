"""A sparse-attention indexer on sequences of any length, in bounded memory.

transformers' indexer multiplies [B, S, heads, D] by [B, 1, D, T], for which torch copies the keys once for every
position: 34 GB for one sequence of 8,192 tokens with keys of 128. Given a block of queries and the keys up to its end,
it is the same code, and the copy is as small as the block.

Shape suffixes: B = sequences of a batch, S = tokens per sequence, Q = tokens of a block, T = keys up to its end,
H = hidden size, R = query rank, D = width of a key, K = positions selected.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

FLOAT_BYTES = 4
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}


class IndexerCache(Protocol):
    """What transformers' indexer asks of a cache: takes the keys of a call, gives those to score."""

    def update_indexer(self, key: Tensor, layer: int) -> Tensor: ...


class SelectAll(nn.Module):
    """Stands in for an indexer when the sequence has no more positions than it selects.

    The result is the same, and the scores ([S, heads, S] with a copy of the keys for every position) are never made.
    A cache gets the keys all the same: an engine stores them, whatever the length.
    """

    def __init__(self, indexer: Any) -> None:
        super().__init__()
        self.indexer = indexer

    def forward(self, hidden_BSH: Tensor, *rest: Any, past_key_values: IndexerCache | None = None) -> Tensor:
        if past_key_values is not None:
            _stored_keys(self.indexer, past_key_values, hidden_BSH, *rest)
        size, length = hidden_BSH.shape[:2]
        return torch.arange(length, dtype=torch.int32, device=hidden_BSH.device).expand(size, length, length)


class KeyCache:
    """Keeps the keys of a block, gives those of all blocks so far."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []

    def update_indexer(self, key: Tensor, layer: int) -> Tensor:
        self._keys.append(key)
        return torch.cat(self._keys, dim=1)


class _StoredKeys:
    """Gives keys that another cache has made, up to the end of the block."""

    def __init__(self, key_BSD: Tensor) -> None:
        self._key_BSD, self._end = key_BSD, 0

    def update_indexer(self, key: Tensor, layer: int) -> Tensor:
        self._end += key.shape[1]
        return self._key_BSD[:, : self._end]


class _FirstKey:
    """Keeps the keys and gives the first alone, so that next to nothing is scored."""

    key_BSD: Tensor

    def update_indexer(self, key: Tensor, layer: int) -> Tensor:
        self.key_BSD = key
        return key[:, :1]


def _stored_keys(
    indexer: Any, cache: IndexerCache, hidden_BSH: Tensor, query_BSR: Tensor, rotary: Any, mask_BSS: Tensor, *_: object
) -> Tensor:
    """What the cache makes of the keys of the whole sequences: [B, S, D]."""
    first = _FirstKey()
    indexer(hidden_BSH, query_BSR, rotary, mask_BSS[..., :1], None, past_key_values=first)
    return cache.update_indexer(first.key_BSD, indexer.layer_idx)


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
        past_key_values: IndexerCache | None = None,
    ) -> Tensor:
        """The positions that each query reads: [B, S, K], int32. `mask_BSS` must be causal and boolean.

        A cache is asked once, for the keys of the whole sequences; it has none of earlier tokens.
        """
        assert mask_BSS.dtype == torch.bool, "calibration runs whole sequences"
        size, length = hidden_BSH.shape[:2]
        wanted = min(self.indexer.index_topk, length)
        cache: IndexerCache = KeyCache()
        if past_key_values is not None:
            cache = _StoredKeys(_stored_keys(self.indexer, past_key_values, hidden_BSH, query_BSR, rotary, mask_BSS))
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

"""The buffer between layers and what an indexer leaves in it.

Shape suffixes: N = sequences, S = tokens per sequence, H = hidden size, K = selected positions.
"""

import pytest
import torch
from torch import Tensor

from kvq.calibration.activations import ActivationStore

CPU = torch.device("cpu")


def store(num_sequences: int = 5, length: int = 6, batch_size: int = 2) -> ActivationStore:
    hidden_NSH = torch.arange(num_sequences * length * 3, dtype=torch.float32).reshape(num_sequences, length, 3)
    return ActivationStore(hidden_NSH, batch_size)


def selection(num_sequences: int, length: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, length, (num_sequences, length, size), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 9])
def test_batches_cover_every_sequence_once(batch_size: int) -> None:
    batches = list(store(batch_size=batch_size).batches())
    assert [index for batch in batches for index in range(batch.start, batch.stop)] == list(range(5))
    assert all(0 < batch.stop - batch.start <= batch_size for batch in batches)


def test_what_is_written_is_read_and_nothing_else_changes() -> None:
    given = store()
    before = given.hidden_NSH.clone()
    given.write(slice(2, 4), torch.full((2, 6, 3), -1.0))
    assert bool((given.read(slice(2, 4), CPU) == -1).all())
    assert torch.equal(given.hidden_NSH[[0, 1, 4]], before[[0, 1, 4]])
    assert given.num_tokens == 30


def test_selections_are_kept_for_each_batch() -> None:
    given, topk_NSK = store(), selection(5, 6, 4)
    for batch in given.batches():
        given.write_topk(batch, topk_NSK[batch])
    for batch in given.batches():
        assert torch.equal(given.read_topk(batch, CPU, 4), topk_NSK[batch])
    assert given.read_topk(slice(0, 2), CPU, 4).dtype == torch.int32


def test_a_later_layer_s_selection_replaces_the_earlier() -> None:
    given = store()
    for topk_NSK in (selection(5, 6, 4), selection(5, 6, 4).flip(0)):
        given.write_topk(slice(0, 5), topk_NSK)
        assert torch.equal(given.read_topk(slice(1, 3), CPU, 4), topk_NSK[1:3])


@pytest.mark.parametrize("index_topk", [6, 16])
def test_selecting_everything_needs_no_memory(index_topk: int) -> None:
    given = store()
    given.write_topk(slice(0, 2), selection(2, 6, 6))
    everything = given.read_topk(slice(0, 2), CPU, index_topk)
    assert everything.dtype == torch.int32
    assert torch.equal(everything, torch.arange(6, dtype=torch.int32).expand(2, 6, 6))

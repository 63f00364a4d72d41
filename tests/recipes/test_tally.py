"""Kinds of tensors: every tensor counted once, whatever its order."""

import random
from pathlib import Path

import pytest

from kvq.checkpoint.architecture import model_facts
from kvq.checkpoint.facts import known_checkpoint, published_index
from kvq.recipes.plan import tensor_class
from kvq.recipes.tally import tally


@pytest.mark.parametrize("alias", ["glm-5.2", "kimi-k2.6", "glm-4.5"])
def test_every_tensor_is_counted_once(alias: str) -> None:
    known = known_checkpoint(alias)
    index, facts = published_index(known), model_facts(known.config, Path(alias))
    tensors = list(index.tensors.values())
    kinds = tally(tensors, facts)
    assert sum(kind.tensors for kind in kinds) == len(tensors) and len(kinds) < 450
    assert sum(kind.nbytes for kind in kinds) == index.total_bytes
    for title in {kind.tensor_class for kind in kinds}:
        of_class = sum(tensor_class(tensor.name, facts) == title for tensor in tensors)
        assert sum(kind.tensors for kind in kinds if kind.tensor_class == title) == of_class, title
    random.Random(3).shuffle(tensors)
    assert sorted(map(repr, tally(tensors, facts))) == sorted(map(repr, kinds))


def test_parameters_are_weights_whatever_they_are_stored_as() -> None:
    counts = []
    for alias, bf16 in (("glm-5.2", False), ("glm-5.2", True)):
        known = known_checkpoint(alias)
        kinds = tally(published_index(known, bf16).tensors.values(), model_facts(known.config, Path(alias)))
        counts.append(sum(kind.parameters for kind in kinds))
    assert counts[0] == counts[1] == 753_329_940_480


def test_mtp_layers_are_told_apart() -> None:
    known = known_checkpoint("glm-5.2")
    kinds = tally(published_index(known, bf16=True).tensors.values(), model_facts(known.config, Path("glm-5.2")))
    assert sum(kind.tensors for kind in kinds if kind.mtp) == 791

"""Tensors counted: the few kinds that a checkpoint's hundred thousand tensors come in, with their numbers and bytes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvq.checkpoint.architecture import ModelFacts
from kvq.checkpoint.header import tensor_bytes
from kvq.recipes.plan import class_in_layer, tensor_class, without_expert

SCALES = ("weight_scale", "weight_scale_inv", "weight_shape", "k_scale", "v_scale", "input_scale")
CODES_PER_WORD = 8


@dataclass(slots=True)
class Kind:
    """Tensors that differ in layer and expert only. `below` is their name below the layer (or the prefix); `mtp` says
    that they lie in a multi-token-prediction layer. `parameters` counts weights, whatever they are stored as."""

    tensor_class: str
    below: str
    dtype: str
    mtp: bool
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0


def tally(tensors: Iterable[tuple[str, str, tuple[int, ...]]], facts: ModelFacts) -> list[Kind]:
    """Kinds of tensors given as name, dtype and shape."""
    kinds: dict[tuple[str, str, bool, tuple[int, ...]], Kind] = {}
    counts: dict[tuple[str, str, bool, tuple[int, ...]], int] = {}
    for name, dtype, shape in tensors:
        place = facts.place_of(name)
        if place is None:
            key = (name.removeprefix(facts.arch.prefix), dtype, False, shape)
        else:
            key = (without_expert(place[1]), dtype, place[0] >= facts.num_layers, shape)
        if key not in kinds:
            title = tensor_class(name, facts) if place is None else class_in_layer(key[0])
            kinds[key] = Kind(title, key[0], dtype, key[2])
        counts[key] = counts.get(key, 0) + 1
    for (below, dtype, _, shape), count in counts.items():
        kind = kinds[below, dtype, _, shape]
        kind.tensors, kind.nbytes = count, count * tensor_bytes(dtype, shape)
        kind.parameters = count * _parameters(below, dtype, shape)
    return list(kinds.values())


def _parameters(below: str, dtype: str, shape: tuple[int, ...]) -> int:
    if below.endswith(SCALES):
        return 0
    return math.prod(shape) * (CODES_PER_WORD if dtype == "I32" and below.endswith("weight_packed") else 1)

"""Tensors counted: the few kinds that a checkpoint's hundred thousand tensors come in, with their numbers and bytes."""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvq.checkpoint.architecture import ModelFacts
from kvq.checkpoint.formats import CODES_PER_WORD
from kvq.checkpoint.header import TensorInfo, tensor_bytes
from kvq.recipes.plan import TensorPlan, class_in_layer, tensor_class

SCALES = ("weight_scale", "weight_scale_inv", "weight_shape", "k_scale", "v_scale", "input_scale")


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors that differ in layer and expert only. `below` is their name below the layer, or the whole name outside
    the layers; `mtp` says that they lie in a multi-token-prediction layer. `parameters` counts weights, whatever they
    are stored as."""

    tensor_class: str
    below: str
    dtype: str
    mtp: bool
    tensors: int
    parameters: int
    nbytes: int


def tally(tensors: Collection[TensorInfo] | Collection[TensorPlan], facts: ModelFacts) -> list[Kind]:
    """Kinds of the tensors of a source or of an output."""
    rows: list[TensorInfo | TensorPlan] = [*tensors]
    places = facts.places([row.name for row in rows])
    counts = Counter(
        (layer is None, name if layer is None else below, row.dtype, (layer or 0) >= facts.num_layers, row.shape)
        for (name, layer, below), row in zip(places, rows, strict=True)
    )
    return [
        Kind(
            tensor_class(below, facts) if outside else class_in_layer(below), below, dtype, mtp,
            count, count * _parameters(below, dtype, shape), count * tensor_bytes(dtype, shape),
        )
        for (outside, below, dtype, mtp, shape), count in counts.items()
    ]  # fmt: skip


def _parameters(below: str, dtype: str, shape: tuple[int, ...]) -> int:
    if below.endswith(SCALES):
        return 0
    return math.prod(shape) * (CODES_PER_WORD if dtype == "I32" and below.endswith("weight_packed") else 1)

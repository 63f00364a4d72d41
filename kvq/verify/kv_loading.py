"""Which KV scales of a checkpoint an engine would load: the loaders' name mapping, emulated from the delivery table.

Needs names only, so that `kvq inspect` loads no framework.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvq.checkpoint.architecture import ModelFacts
from kvq.verify.kv_delivery import SCALE_NAMES, Delivery, conditions_of

ENDINGS = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def kv_scale_names(names: Iterable[str]) -> list[str]:
    """Tensors that are meant as KV scales, under any name in use."""
    return sorted(name for name in names if ".self_attn." in name and name.endswith(ENDINGS))


def emulate_loading(
    row: Delivery, facts: ModelFacts, names: list[str], quantization: Mapping[str, Any] | None
) -> dict[str, list[str]]:
    """Names that are `matched`, `ignored` and `refused`, and parameters of decoder layers that stay `missing` (1.0)."""
    conditions = conditions_of(quantization)
    matched: list[str] = []
    ignored: list[str] = []
    refused: list[str] = []
    filled: set[str] = set()
    for name in names:
        place = facts.place_of(name)
        parameter = None if place is None else row.lands_in(place[1], conditions)
        if place is None or parameter is None:
            stops = place is not None and row.refuses(place[1], conditions)
            (refused if stops else ignored).append(name)
        else:
            matched.append(name)
            filled.add(f"{facts.layer_prefix(place[0])}{parameter}")
    expected = []
    if conditions.intersection(row.parameters_when):
        home = {"sglang": "self_attn.attn_mqa.", "vllm": "self_attn.attn.", "transformers": "self_attn."}[row.target]
        expected = [facts.layer_prefix(i) + home + name for i in range(facts.num_layers) for name in SCALE_NAMES]
    missing = [name for name in expected if name not in filled]
    return {"matched": matched, "ignored": ignored, "refused": refused, "missing": missing}

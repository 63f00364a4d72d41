"""Which KV scales of a checkpoint an engine would load: the loaders' name mapping, emulated from the delivery table."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvq.checkpoint.architecture import ModelFacts, model_facts
from kvq.checkpoint.formats import find_quantization_config
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CheckpointError
from kvq.verify.kv_delivery import SCALE_NAMES, Delivery, Target, conditions_of, deliveries
from kvq.verify.report import Check

ENDINGS = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def kv_scale_names(names: Iterable[str]) -> list[str]:
    """Tensors that are meant as KV scales, under any name in use."""
    return sorted(name for name in names if ".self_attn." in name and name.endswith(ENDINGS))


def check_kv_scales(folder: Path, target: Target) -> Check:
    """Every scale is finite and positive; none is loaded where it would corrupt; none is missing where the config
    promises static ones. What is ignored is said, and is no problem: the engine is as it would be without."""
    check = Check("KV scales")
    try:
        reader = CheckpointReader(folder)
        facts = model_facts(reader.config, folder)
    except CheckpointError:
        check.note = "the folder cannot be opened"
        return check
    names = kv_scale_names(reader.index.tensors)
    described = find_quantization_config(reader.config)
    if not names and not (described or {}).get("kv_cache_scheme"):
        check.note = "none in the checkpoint: an FP8 cache is kept at 1.0"
        return check
    values = {name: _value(check, reader, name) for name in names}
    notes = []
    for row in deliveries(target, facts.arch.attention):
        found = emulate_loading(row, facts, names, described)
        notes.append(
            f"{row.engine}: {len(found['matched'])} loaded, {len(found['ignored'])} ignored, "
            f"{len(found['missing'])} missing"
        )
        _expect_right(check, row, found, values)
    if target == "sglang" and (described or {}).get("kv_cache_scheme"):
        notes.append("its kv_cache_scheme makes SGLang 0.5.23 take an FP8 cache by default")
    check.note = "; ".join(notes)
    return check


def _value(check: Check, reader: CheckpointReader, name: str) -> float:
    """The scale, or NaN for what is none."""
    try:
        tensor = reader.tensor(name)
    except CheckpointError:  # NaN, Inf or damaged; `values` says which
        check.expect(False, f"{name} cannot be read: a scale must be finite and positive")
        return math.nan
    values = [float(value) for value in tensor.float().reshape(-1)]
    good = bool(values) and all(0 < value < math.inf for value in values)
    check.expect(good, f"{name} is {values[:4]}: a scale must be finite and positive")
    return max(values) if good else math.nan


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


def _expect_right(check: Check, row: Delivery, found: Mapping[str, list[str]], values: Mapping[str, float]) -> None:
    for name in found["matched"]:
        harmless = row.verdict == "used" or values[name] == 1.0
        check.expect(harmless, f"{name} would be loaded by {row.engine} and do harm: {row.reason}")
    for name in found["refused"]:
        check.expect(False, f"{row.engine} does not start with {name}, which it has no place for; remove it")
    if row.verdict == "used":
        check.num_checked += 1
        if found["missing"]:
            check.problems.append(
                f"config.json promises static KV scales, but {row.engine} finds none for {found['missing'][0]} "
                f"({len(found['missing'])} in all) and takes 1.0"
            )

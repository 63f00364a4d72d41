"""A checkpoint's KV scales, as values and as what the engines would make of them."""

import math
from collections.abc import Mapping
from pathlib import Path

from kvq.checkpoint.architecture import model_facts
from kvq.checkpoint.formats import find_quantization_config
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CheckpointError
from kvq.verify.kv_delivery import Delivery, Target, deliveries
from kvq.verify.kv_loading import emulate_loading, kv_scale_names
from kvq.verify.report import Check


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

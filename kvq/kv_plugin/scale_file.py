"""Reading `kv_cache_scales.json` inside an engine, with nothing but the standard library."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = "kvq.kv-scales/1"
FP8_DTYPE = "fp8_e4m3"
SCALE_NAMES = ("k_scale", "v_scale")


class PluginError(Exception):
    """Why the scales cannot be used, as one sentence that says what to do."""


@dataclass(frozen=True)
class ScaleFile:
    """Scales by layer. `attention` is gqa or mla; layers at or after `num_layers` are MTP layers."""

    path: str
    attention: str
    num_layers: int
    layers: Mapping[int, Mapping[str, float]]


def read_scales(path: str) -> ScaleFile:
    """The file, checked: every decoder layer there, every scale finite and positive. Raises PluginError."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PluginError(f"the file cannot be read ({error}); make it with `kvq calibrate-kv`.") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA or value.get("dtype") != FP8_DTYPE:
        raise PluginError(f"it is not a {SCHEMA} file for {FP8_DTYPE}; make it with `kvq calibrate-kv`.")
    attention, count, rows = value.get("attention"), value.get("num_layers"), value.get("layers")
    if attention == "dsa":
        raise PluginError(
            "sparse attention (GLM-5.x) scales its cache by itself, token by token; static scales do harm."
        )
    if attention not in ("gqa", "mla") or not isinstance(count, int) or not isinstance(rows, dict):
        raise PluginError("attention, num_layers or layers are not what kvq writes; make the file again.")
    layers = {int(layer): _scales_of(layer, row) for layer, row in rows.items()}
    missing = [layer for layer in range(count) if layer not in layers]
    if missing:
        raise PluginError(f"there is no scale of layer {missing[0]}; calibrate all {count} layers.")
    if attention == "mla" and any(len(set(row.values())) > 1 for row in layers.values()):
        raise PluginError("k_scale and v_scale differ, but MLA stores one row under one scale; make the file again.")
    return ScaleFile(path, attention, count, layers)


def _scales_of(layer: str, row: Any) -> dict[str, float]:
    scales = {name: row.get(name) if isinstance(row, dict) else None for name in SCALE_NAMES}
    for name, scale in scales.items():
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < math.inf:
            raise PluginError(f"{name} of layer {layer} is {scale!r}, not a positive number; make the file again.")
    return {name: float(scale) for name, scale in scales.items() if scale is not None}

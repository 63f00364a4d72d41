"""How the written bytes are described to the engines: the `quantization_config` of config.json.

Layout B of two compressed-tensors groups: INT4 experts by regular expression first (transformers takes the first group
whose pattern names experts), the literal target `Linear` for the FP8 rest (SGLang reads its block size from that key
only). The top-level format must be `pack-quantized`: SGLang refuses `mixed-precision` for INT4 experts.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvq.checkpoint.formats import SourceFormat
from kvq.recipes.schema import Recipe

EXPERTS_TARGET = r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"

# Modules that stay in BF16 beside FP8 linears, as patterns that also match the names after SGLang's fusion.
# wk and weights_proj: SGLang fuses them into one BF16 parameter; 0.5.17 reads weights_proj in BF16 only.
BESIDE_FP8 = (
    "lm_head",
    r"re:.*indexer\.(wk|weights_proj|wk_weights_proj)$",
    r"re:.*\.mlp\.gate$",
    r"re:.*\.eh_proj$",
    r"re:.*\.shared_head\.head$",
)
# Where all but the experts is BF16. SGLang refuses a linear module that no group targets and no entry ignores.
BESIDE_EXPERTS = (
    "lm_head",
    r"re:.*\.self_attn\..*",
    r"re:.*\.mlp\.shared_experts\..*",
    r"re:.*\.mlp\.(gate|up|gate_up|down)_proj$",
    r"re:.*\.mlp\.gate$",
    r"re:.*\.eh_proj$",
    r"re:.*\.shared_head\.head$",
)


def experts_group(recipe: Recipe) -> dict[str, Any]:
    """The INT4 group."""
    weights = {
        "num_bits": recipe.num_bits, "type": "int", "symmetric": recipe.symmetric, "strategy": "group",
        "group_size": recipe.group_size, "dynamic": False, "actorder": None,
    }  # fmt: skip
    return {
        "targets": [EXPERTS_TARGET], "format": "pack-quantized", "weights": weights,
        "input_activations": None, "output_activations": None,
    }  # fmt: skip


def rest_group(source: SourceFormat) -> dict[str, Any] | None:
    """The FP8 group: the source's own where it is compressed-tensors already; None when nothing is FP8."""
    if source.fp8_group is not None:
        return {**source.fp8_group, "targets": ["Linear"], "format": "float-quantized"}
    if source.block is None:
        return None
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**common, "strategy": "block", "block_structure": list(source.block), "dynamic": False}
    activations = {**common, "strategy": "group", "group_size": source.block[1], "dynamic": True}
    return {
        "targets": ["Linear"], "format": "float-quantized", "weights": weights,
        "input_activations": activations, "output_activations": None,
    }  # fmt: skip


def quantization_config(recipe: Recipe, source: SourceFormat, unquantized: Iterable[str]) -> dict[str, Any]:
    """The whole object. `unquantized` are the names of linear modules left in BF16. Only patterns that match one of
    them are written, so that no ignore entry is dead, and those that no pattern matches are named one by one."""
    groups: dict[str, Any] = {"group_0": experts_group(recipe)}
    rest = rest_group(source) if recipe.rest == "keep" else None
    if rest is not None:
        groups["group_1"] = rest
    names = list(unquantized)
    matches = {
        pattern: [name for name in names if _names(pattern, name)]
        for pattern in (BESIDE_EXPERTS if rest is None else BESIDE_FP8)
    }
    ignore = [pattern for pattern, matched in matches.items() if matched]
    ignore += sorted(set(names).difference(*matches.values()))
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups, "ignore": ignore, "kv_cache_scheme": None,
    }  # fmt: skip


def _names(entry: str, module: str) -> bool:
    """Engines' rule for an ignore list: a pattern from the name's start, or the whole name or its end behind a dot."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return f".{module}".endswith(f".{entry}")


def output_config(config: Mapping[str, Any], quantization: Mapping[str, Any], text_key: str | None) -> dict[str, Any]:
    """The source's config.json with its `quantization_config` replaced; everything else and the order stay."""
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    if text_key is not None and isinstance(result.get(text_key), dict):
        result[text_key] = {key: value for key, value in result[text_key].items() if key != "quantization_config"}
    result["quantization_config"] = dict(quantization)
    return result

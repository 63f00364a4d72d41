"""What a checkpoint folder is, from config, index and headers: kvq's own or anybody's. Reads no weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq.checkpoint.architecture import ModelFacts, model_facts
from kvq.checkpoint.formats import detect_format, find_quantization_config
from kvq.checkpoint.index import (
    INDEX_NAME,
    MANIFEST_NAME,
    CheckpointIndex,
    expect_folder,
    load_config,
    load_index,
    load_json,
)
from kvq.errors import CheckpointError
from kvq.recipes.plan import REASONS, dead_entries
from kvq.recipes.tally import Kind, tally
from kvq.verify.kv_delivery import deliveries
from kvq.verify.kv_loading import emulate_loading, kv_scale_names

QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "I32", "U8", "I8", "F4")
SIDE_FILES = ("generation_config.json", "tokenizer_config.json", "LICENSE")


def inspect_folder(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError only where there is nothing to look at: no config, or damaged headers."""
    expect_folder(folder)
    config = load_config(folder)
    index = load_index(folder)
    problems = list(index.warnings)
    try:
        facts: ModelFacts | None = model_facts(config, folder)
    except CheckpointError as error:
        facts = None
        problems.append(str(error))
    try:
        described = detect_format(config, index).title
    except CheckpointError as error:
        described = "a format that kvq does not read"
        problems.append(str(error))
    kinds = [] if facts is None else tally(index.tensors.values(), facts)
    quantization = find_quantization_config(config)
    dead = dead_entries(_ignore_list(quantization), index.tensors)
    missing = _missing_files(folder, config)
    scales = _kv_scales(index, facts, quantization)
    return {
        "folder": str(folder),
        "title": facts.arch.title if facts is not None else str(config.get("model_type")),
        "format": described,
        "written_by_kvq": (folder / MANIFEST_NAME).exists(),
        "tensors": len(index.tensors),
        "shards": len(index.shards),
        "bytes": index.total_bytes,
        "classes": _class_rows(kinds),
        "quantized_classes": sorted({kind.tensor_class for kind in kinds if kind.dtype in QUANTIZED_DTYPES}),
        "kv_scales": scales,
        "mtp_layers": [] if facts is None else _mtp_layers(facts, index),
        "dead_ignore_entries": dead,
        "missing_side_files": missing,
        "findings": _findings(kinds, scales, facts, index, dead, missing),
        "problems": problems,
    }


def _class_rows(kinds: list[Kind]) -> list[dict[str, Any]]:
    rows = []
    for title in REASONS:
        mine = [kind for kind in kinds if kind.tensor_class == title]
        if mine:
            dtypes: dict[str, int] = {}
            for kind in mine:
                dtypes[kind.dtype] = dtypes.get(kind.dtype, 0) + kind.nbytes
            rows.append(
                {
                    "class": title,
                    "tensors": sum(kind.tensors for kind in mine),
                    "parameters": sum(kind.parameters for kind in mine),
                    "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1])),
                    "bytes": sum(kind.nbytes for kind in mine),
                }
            )
    return rows


def _ignore_list(quantization: Mapping[str, Any] | None) -> list[str]:
    entries = (quantization or {}).get("ignore") or (quantization or {}).get("modules_to_not_convert") or []
    return [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []


def _kv_scales(
    index: CheckpointIndex, facts: ModelFacts | None, quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    """How many static KV scales there are, and how many of them the newest SGLang that kvq knows would load."""
    names, loaded = kv_scale_names(index.tensors), 0
    if facts is not None:
        newest = deliveries("sglang", facts.arch.attention)[-1]
        loaded = len(emulate_loading(newest, facts, names, quantization)["matched"])
    return {"count": len(names), "loaded_by_sglang": loaded}


def _mtp_layers(facts: ModelFacts, index: CheckpointIndex) -> list[dict[str, Any]]:
    counts = dict.fromkeys(facts.mtp_layers, 0)
    for name in index.tensors:
        layer = facts.layer_of(name)
        if layer in counts:
            counts[layer] += 1
    return [{"layer": layer, "tensors": count} for layer, count in counts.items()]


def _missing_files(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Files that a served model needs beside its weights, and the code that its config names."""
    missing = [name for name in SIDE_FILES if not (folder / name).exists()]
    if not (folder / "tokenizer.json").exists() and not (folder / "tiktoken.model").exists():
        missing.append("tokenizer.json or tiktoken.model")
    if not (folder / "chat_template.jinja").exists() and not _template_inside(folder):
        missing.append("chat_template.jinja")
    if len(list(folder.glob("*.safetensors"))) > 1 and not (folder / INDEX_NAME).exists():
        missing.append(INDEX_NAME)
    modules = config.get("auto_map")
    for value in modules.values() if isinstance(modules, dict) else ():
        code = f"{str(value).split('.', maxsplit=1)[0]}.py"
        if "--" not in code and not (folder / code).exists() and code not in missing:
            missing.append(code)
    return missing


def _template_inside(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    return path.exists() and "chat_template" in load_json(path)


def _findings(
    kinds: list[Kind],
    scales: Mapping[str, Any],
    facts: ModelFacts | None,
    index: CheckpointIndex,
    dead: list[str],
    missing: list[str],
) -> dict[str, str]:
    """A sentence for each thing that people look for."""
    quantized = sorted({kind.tensor_class for kind in kinds if kind.dtype in QUANTIZED_DTYPES})
    layers = [] if facts is None else _mtp_layers(facts, index)
    mtp = "none" if not layers else ", ".join(f"layer {row['layer']}: {row['tensors']} tensors" for row in layers)
    if any(row["tensors"] == 0 for row in layers):
        mtp += " (the config promises a layer that is not there: set num_nextn_predict_layers to 0)"
    kv = "none" if not scales["count"] else f"{scales['count']}, of which SGLang loads {scales['loaded_by_sglang']}"
    return {
        "quantized": ", ".join(quantized) or "nothing",
        "KV scales": kv,
        "MTP": mtp,
        "dead ignore entries": ", ".join(dead) or "none",
        "side files missing": ", ".join(missing) or "none",
    }

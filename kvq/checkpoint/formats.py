"""What a source checkpoint is stored as, decided from config and tensor names before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvq.checkpoint.index import CheckpointIndex
from kvq.checkpoint.patterns import check_patterns
from kvq.errors import CheckpointError

FormatKind = Literal["fp8-block", "fp8-channel", "int4-packed", "bf16"]
FLOAT_DTYPES = ("BF16", "F16", "F32")
CODES_PER_WORD = 8  # of four bits, in an int32 of `weight_packed`


@dataclass(frozen=True, slots=True)
class SourceFormat:
    """`scale_suffix` names the tensor beside an FP8 `weight`; `block` is its tile; `fp8_group` the source's own
    compressed-tensors group for FP8 weights, kept for the output config."""

    kind: FormatKind
    title: str
    scale_suffix: str | None = None
    block: tuple[int, int] | None = None
    group_size: int | None = None
    fp8_group: Mapping[str, Any] | None = None
    ignore: tuple[str, ...] = ()


def find_quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `quantization_config`, which multimodal checkpoints may keep inside `text_config`."""
    for place in (config, config.get("text_config")):
        if isinstance(place, dict) and isinstance(place.get("quantization_config"), dict):
            found: dict[str, Any] = place["quantization_config"]
            return found
    return None


def detect_format(config: Mapping[str, Any], index: CheckpointIndex) -> SourceFormat:
    """Raises CheckpointError, in one sentence, for a format that kvq does not read."""
    quantization = find_quantization_config(config)
    place = index.folder / "config.json"
    if quantization is None:
        source = SourceFormat("bf16", "BF16")
    elif quantization.get("quant_method") == "fp8":
        source = _fp8(quantization, place)
    elif quantization.get("quant_method") == "compressed-tensors":
        source = _compressed_tensors(quantization, place)
    else:
        method = quantization.get("quant_method")
        raise CheckpointError(
            f"{place}: quant_method {method!r} is not supported; kvq reads fp8 (128x128 blocks), compressed-tensors "
            "FP8 and INT4, and plain BF16. Start from the FP8 or BF16 release of this model."
        )
    _check_dtypes(index, source)
    return source


def _block(value: Any, place: Path) -> tuple[int, int]:
    if isinstance(value, str):
        value = [int(part) if part.isdigit() else 0 for part in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise CheckpointError(
            f"{place}: FP8 without a usable block size (found {value!r}); kvq reads block-scaled FP8."
        )
    return value[0], value[1]


def _ignore(value: Any, place: Path) -> tuple[str, ...]:
    """A list of modules that are not quantized: names, and regular expressions behind `re:`."""
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise CheckpointError(f"{place}: expected a list of names to ignore, found {value!r}. Download it again.")
    check_patterns(entries, place)
    return tuple(entries)


def _fp8(quantization: Mapping[str, Any], place: Path) -> SourceFormat:
    block = _block(quantization.get("weight_block_size"), place)
    ignore = _ignore(quantization.get("modules_to_not_convert"), place)
    return SourceFormat(
        "fp8-block", f"FP8 in {block[0]}x{block[1]} blocks", "weight_scale_inv", block, None, None, ignore
    )


def _compressed_tensors(quantization: Mapping[str, Any], place: Path) -> SourceFormat:
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(map(_is_group, groups.values())):
        raise CheckpointError(f"{place}: compressed-tensors without usable config_groups. Download config.json again.")
    ignore = _ignore(quantization.get("ignore"), place)
    weights = [group.get("weights") or {} for group in groups.values()]
    for group in weights:
        if (group.get("type"), group.get("num_bits")) == ("int", 4):
            size = group.get("group_size")
            if not group.get("symmetric") or group.get("strategy") != "group" or not isinstance(size, int) or size < 1:
                raise CheckpointError(f"{place}: only symmetric group-wise INT4 is supported, found {group!r}.")
            return _int4(groups, weights, group, ignore, place)
    if len(weights) == 1 and (weights[0].get("type"), weights[0].get("num_bits")) == ("float", 8):
        fp8_group = next(iter(groups.values()))
        return _compressed_fp8(fp8_group, ignore, place)
    raise CheckpointError(
        f"{place}: compressed-tensors groups {weights!r} are not supported; kvq reads one FP8 group (channel or "
        "block), or INT4. Start from the FP8 or BF16 release of this model."
    )


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("weights") or {}, dict)


def _int4(
    groups: Mapping[str, Any], weights: list[Any], group: Mapping[str, Any], ignore: tuple[str, ...], place: Path
) -> SourceFormat:
    """Already INT4; a second FP8 group is what kvq itself writes."""
    block = next((_block(w.get("block_structure"), place) for w in weights if w.get("strategy") == "block"), None)
    fp8_group = next((g for g in groups.values() if (g.get("weights") or {}).get("type") == "float"), None)
    size = int(group["group_size"])
    return SourceFormat("int4-packed", f"INT4 in groups of {size}", "weight_scale", block, size, fp8_group, ignore)


def _compressed_fp8(group: Mapping[str, Any], ignore: tuple[str, ...], place: Path) -> SourceFormat:
    strategy = group["weights"].get("strategy")
    if strategy == "channel":
        return SourceFormat("fp8-channel", "FP8 per output channel", "weight_scale", None, None, group, ignore)
    if strategy == "block":
        block = _block(group["weights"].get("block_structure"), place)
        return SourceFormat(
            "fp8-block", f"FP8 in {block[0]}x{block[1]} blocks", "weight_scale", block, None, group, ignore
        )
    raise CheckpointError(f"{place}: FP8 with strategy {strategy!r} is not supported; kvq reads channel and block.")


def _check_dtypes(index: CheckpointIndex, source: SourceFormat) -> None:
    """Every FP8 tensor needs its scale, every quantized dtype a config that explains it."""
    beside = f"_{(source.scale_suffix or 'weight_scale').removeprefix('weight_')}"
    for name, info in index.tensors.items():
        if info.dtype in ("F8_E4M3", "F8_E5M2"):
            scale = name + beside
            explained = source.scale_suffix is not None and name.endswith(".weight")
            if not explained or info.dtype == "F8_E5M2" or len(info.shape) != 2:
                raise CheckpointError(
                    f"{index.folder / info.shard}: {name} is {info.dtype} {list(info.shape)}, which the config does "
                    "not explain. Is config.json from another release?"
                )
            if scale not in index.tensors:
                raise CheckpointError(
                    f"{index.folder / info.shard}: FP8 tensor {name} has no scale {scale}; its values mean nothing "
                    "without it. Download the index and the shards again."
                )
            _check_scale_shape(index, name, scale, source)
        elif info.dtype in ("F4", "F8_E8M0", "U8"):
            raise CheckpointError(
                f"{index.folder / info.shard}: {name} is {info.dtype}: MXFP4/NVFP4 and other packed formats are not "
                "supported. Start from the FP8 or BF16 release of this model."
            )
        elif source.kind != "int4-packed" and name.endswith(".weight") and info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{index.folder / info.shard}: {name} is {info.dtype}, expected BF16, F16, F32 or the FP8 that the "
                "config describes. Is config.json from another release?"
            )


def _check_scale_shape(index: CheckpointIndex, name: str, scale: str, source: SourceFormat) -> None:
    rows, columns = index[name].shape
    expected = (rows, 1)
    if source.block is not None:
        expected = (-(-rows // source.block[0]), -(-columns // source.block[1]))
    found = index[scale]
    if (
        found.shape not in (expected, expected[:1] if source.block is None else expected)
        or found.dtype not in FLOAT_DTYPES
    ):
        raise CheckpointError(
            f"{index.folder / found.shard}: {scale} is {found.dtype} {list(found.shape)}, expected a float tensor "
            f"{list(expected)} for {name} {[rows, columns]}."
        )

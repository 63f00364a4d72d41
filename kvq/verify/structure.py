"""Is a checkpoint folder whole and consistent? Answered from its files alone, as an engine would meet them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq.checkpoint.architecture import MTP_NORMS, PROJECTIONS, ModelFacts, model_facts
from kvq.checkpoint.formats import CODES_PER_WORD, detect_format, find_quantization_config
from kvq.checkpoint.hashing import sha256_file
from kvq.checkpoint.index import INDEX_NAME, MANIFEST_NAME, load_json
from kvq.checkpoint.patterns import matching, pattern_problem
from kvq.checkpoint.reader import CheckpointReader
from kvq.checkpoint.side_files import json_side_files
from kvq.checkpoint.untrusted import inside
from kvq.errors import CheckpointError
from kvq.verify.report import Check

MTP_TENSORS = (
    *(f"{norm}.weight" for norm in MTP_NORMS), "eh_proj.weight", "input_layernorm.weight", "self_attn.o_proj.weight",
    "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
)  # fmt: skip
MAX_MANIFEST_BYTES = 2**30  # that of 180,000 tensors has 80 MB
TENSOR_TYPES = {"dtype": str, "shape": list, "shard": str, "sources": list}


def load_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None where kvq did not write the folder. Raises CheckpointError if it is damaged."""
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    manifest = load_json(path, MAX_MANIFEST_BYTES)
    files, tensors, modules = (manifest.get(key) for key in ("files", "tensors", "modules"))
    if not (
        isinstance(files, dict)
        and all(isinstance(sha256, str) for sha256 in files.values())
        and isinstance(tensors, dict)
        and all(map(_is_planned, tensors.values()))
        and isinstance(modules, list)
        and all(map(_is_result, modules))
        and isinstance(manifest.get("pass_through", False), bool)
    ):
        raise CheckpointError(f"{path}: lacks files, tensors or modules as kvq writes them. Quantize again.")
    outside = [name for name in files if inside(folder, name) is None]
    if outside:
        raise CheckpointError(f"{path}: lists {outside[0]!r}, which is no file of this folder. Quantize again.")
    return manifest


def _is_planned(row: Any) -> bool:
    """A tensor's row: types that the checks count on."""
    if not isinstance(row, dict) or not all(isinstance(row.get(key), kind) for key, kind in TENSOR_TYPES.items()):
        return False
    return bool(row["sources"]) and all(isinstance(source, str) for source in row["sources"])


def _is_result(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("name"), str)
        and isinstance(row.get("relative_weight_error"), int | float)
    )


def check_files(folder: Path, manifest: Mapping[str, Any] | None) -> Check:
    """Every file has the hash that the manifest says, and there is no other."""
    check = Check("files")
    if manifest is None:
        check.note = f"no {MANIFEST_NAME}: hashes not checked"
        return check
    listed: Mapping[str, str] = manifest.get("files", {})
    for name, expected in listed.items():
        try:
            found = sha256_file(folder / name) if (folder / name).is_file() else None
        except OSError as error:
            check.expect(False, f"{name} cannot be read ({error.strerror})")
            continue
        check.expect(found is not None, f"{name} is missing")
        if found is not None:
            check.expect(found == expected, f"{name} has changed since it was written (sha256 differs)")
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in listed and name != MANIFEST_NAME:
            check.expect(not name.endswith(".safetensors"), f"{name} is not listed in the manifest")
    return check


def _expect_json(check: Check, folder: Path) -> None:
    """Hashes say nothing of a file that was damaged in the source already, or where there is no manifest."""
    for path in json_side_files(folder):
        try:
            load_json(path)
        except CheckpointError as error:
            check.expect(False, str(error))
        else:
            check.num_checked += 1


def check_index(reader: CheckpointReader) -> Check:
    """Index and shard headers agree, and total_size is the sum of the tensors."""
    check = Check("index")
    check.num_checked = len(reader.index.tensors)
    check.problems += list(reader.index.warnings)
    path = reader.folder / INDEX_NAME
    if path.exists():
        metadata = load_json(path).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        check.expect(
            total == reader.index.total_bytes,
            f"total_size is {total}, the tensors have {reader.index.total_bytes} bytes",
        )
    return check


def check_plan(reader: CheckpointReader, manifest: Mapping[str, Any] | None) -> Check:
    """Every planned tensor is there with its shape and dtype, and nothing else is."""
    check = Check("tensors")
    if manifest is None:
        check.note = f"no {MANIFEST_NAME}: nothing planned to compare with"
        return check
    planned: Mapping[str, Any] = manifest.get("tensors", {})
    for name, plan in planned.items():
        info = reader.index.tensors.get(name)
        check.expect(info is not None, f"{name} is missing")
        if info is not None:
            found = [info.dtype, list(info.shape), info.shard]
            check.expect(found == [plan["dtype"], plan["shape"], plan["shard"]], f"{name} is {found}, planned {plan}")
    for name in reader.index.tensors:
        check.expect(name in planned, f"{name} was not planned")
    return check


def check_values(reader: CheckpointReader) -> Check:
    """Scales are finite and positive; no tensor holds NaN or Inf; packed parts fit each other and the config."""
    check, group_size = Check("values"), _promised_group_size(reader)
    for name in reader.index.tensors:
        try:
            value = reader.tensor(name)
            if name.endswith((".weight_scale", ".weight_scale_inv")):
                check.expect(bool((value.float() > 0).all()), f"{name} holds a scale that is not positive")
            elif name.endswith(".weight_packed"):
                _expect_parts(check, reader, name.removesuffix(".weight_packed"), group_size)
            else:
                check.num_checked += 1
        except CheckpointError as error:
            check.expect(False, str(error))
    return check


def _promised_group_size(reader: CheckpointReader) -> int | None:
    """Of the INT4 weights, by config.json."""
    try:
        return detect_format(reader.config, reader.index).group_size
    except CheckpointError:  # `config` says what is wrong with it
        return None


def _expect_parts(check: Check, reader: CheckpointReader, module: str, group_size: int | None) -> None:
    index = reader.index
    parts = [index.tensors.get(f"{module}.{part}") for part in ("weight_packed", "weight_scale", "weight_shape")]
    if any(part is None for part in parts):
        check.expect(False, f"{module} lacks one of weight_packed, weight_scale, weight_shape")
        return
    packed, scale = index[f"{module}.weight_packed"], index[f"{module}.weight_scale"]
    stored = reader.tensor(f"{module}.weight_shape").tolist()
    fits = len(packed.shape) == len(scale.shape) == 2 and scale.shape[1] > 0
    if fits:
        rows, columns = packed.shape[0], packed.shape[1] * CODES_PER_WORD
        fits = scale.shape[0] == rows and columns % scale.shape[1] == 0 and stored == [rows, columns]
    check.expect(
        fits, f"{module}: packed {list(packed.shape)}, scale {list(scale.shape)}, weight_shape {stored} disagree"
    )
    if fits and group_size is not None:
        found = packed.shape[1] * CODES_PER_WORD // scale.shape[1]
        check.expect(found == group_size, f"{module} has groups of {found}, config.json says {group_size}")


def check_experts(reader: CheckpointReader, facts: ModelFacts) -> Check:
    """Every routed expert of every MoE layer is packed, the MTP layer's too, and none is left unquantized."""
    check = Check("experts")
    promised = len(facts.moe_layers) * facts.num_experts * len(PROJECTIONS)
    if promised > len(reader.index.tensors):
        there = len(reader.index.tensors)
        check.expect(False, f"config.json promises {promised} expert matrices, there are {there} tensors in all")
        return check
    for layer in facts.moe_layers:
        for expert in range(facts.num_experts):
            for projection in PROJECTIONS:
                module = facts.expert_module(layer, expert, projection)
                check.expect(f"{module}.weight_packed" in reader.index, f"{module} is not packed")
                check.expect(f"{module}.weight" not in reader.index, f"{module} is also there unquantized")
    return check


def check_mtp(reader: CheckpointReader, facts: ModelFacts) -> Check:
    """The config's MTP layers have their own tensors, a router and attention."""
    check = Check("MTP")
    if not facts.mtp_layers:
        check.note = "the model has none"
    for layer in facts.mtp_layers:
        prefix = facts.layer_prefix(layer)
        for name in MTP_TENSORS:
            check.expect(
                prefix + name in reader.index, f"{prefix}{name} is missing, but the config promises an MTP layer"
            )
    return check


def check_config(reader: CheckpointReader, facts: ModelFacts) -> Check:
    """The quantization_config parses, its groups cover what is stored, and no ignore entry is dead."""
    check = Check("config")
    described = find_quantization_config(reader.config)
    if described is None:
        check.expect(False, "config.json has no quantization_config")
        return check
    if not _expect_parses(check, described):
        return check
    modules = _linear_modules(reader, facts)
    groups = [group for group in described["config_groups"].values() if isinstance(group, dict)]
    packed_targets = [t for g in groups if (g.get("weights") or {}).get("type") == "int" for t in g["targets"]]
    fp8 = any((g.get("weights") or {}).get("type") == "float" for g in groups)
    ignore: list[str] = list(described.get("ignore") or ())
    broken = [entry for entry in (*packed_targets, *ignore) if pattern_problem(entry)]
    for entry in broken:
        check.expect(False, f"{entry!r} is no regular expression")
    if broken:
        return check
    meant = matching({*packed_targets, *ignore}, modules)
    targeted, ignored = (set().union(*(meant[entry] for entry in entries)) for entries in (packed_targets, ignore))
    for module, kind in modules.items():
        if kind == "packed":
            check.expect(module in targeted, f"no INT4 group covers {module}")
        elif kind == "fp8":
            check.expect(fp8 and module not in ignored, f"{module} is FP8, which the config does not say")
        else:
            check.expect(module in ignored, f"{module} is not quantized, but the config does not ignore it")
    for entry in ignore:
        check.expect(bool(meant[entry]), f"ignore entry {entry!r} names no module")
    return check


def _expect_parses(check: Check, described: Mapping[str, Any]) -> bool:
    """compressed-tensors' own opinion; what it accepts has groups with targets, all of them text."""
    from compressed_tensors.quantization import QuantizationConfig

    try:
        QuantizationConfig.model_validate(dict(described))
        parsed = ""
    except (ValueError, TypeError, AttributeError, KeyError) as error:  # its validators compare before they look
        parsed = re.sub(r" For further information visit \S+", "", " ".join(str(error).split()))
    check.expect(not parsed, f"compressed-tensors refuses the quantization_config: {parsed}")
    return not parsed


def _linear_modules(reader: CheckpointReader, facts: ModelFacts) -> dict[str, str]:
    """Linear modules of the language model -> packed, fp8 or plain."""
    kinds: dict[str, str] = {}
    for name, info in reader.index.tensors.items():
        module, _, part = name.rpartition(".")
        if not name.startswith(facts.arch.prefix) or module.endswith("embed_tokens"):
            continue
        if part == "weight_packed":
            kinds[module] = "packed"
        elif part == "weight" and len(info.shape) == 2:
            kinds[module] = "fp8" if info.dtype == "F8_E4M3" else "plain"
    return kinds


def check_structure(folder: Path, manifest: Mapping[str, Any] | None) -> list[Check]:
    """All checks that need no source. A folder that cannot even be opened gives one failed check."""
    files = check_files(folder, manifest)
    try:
        reader = CheckpointReader(folder)
        facts = model_facts(reader.config, folder)
    except CheckpointError as error:
        opened = Check("open")
        opened.expect(False, str(error))
        return [files, opened]
    _expect_json(files, folder)  # not before the reader has looked for links that lead out of the folder
    checks = [
        files,
        check_index(reader),
        check_plan(reader, manifest),
        check_values(reader),
        check_experts(reader, facts),
        check_mtp(reader, facts),
    ]
    if manifest is None or not manifest.get("pass_through"):
        checks.append(check_config(reader, facts))
    return checks

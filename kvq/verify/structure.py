"""Is a checkpoint folder whole and consistent? Answered from its files alone, as an engine would meet them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvq.checkpoint.architecture import PROJECTIONS, ModelFacts, model_facts
from kvq.checkpoint.formats import find_quantization_config
from kvq.checkpoint.index import INDEX_NAME, MANIFEST_NAME, load_json
from kvq.checkpoint.packing import CODES_PER_WORD
from kvq.checkpoint.reader import CheckpointReader
from kvq.checkpoint.writer import sha256_file
from kvq.errors import CheckpointError
from kvq.verify.report import Check

MTP_TENSORS = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "input_layernorm.weight", "shared_head.norm.weight")


TENSOR_KEYS = ("dtype", "shape", "shard", "sources")
MODULE_KEYS = ("name", "relative_weight_error")


def load_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None where kvq did not write the folder. Raises CheckpointError if it is damaged."""
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    manifest = load_json(path)
    files, tensors, modules = (manifest.get(key) for key in ("files", "tensors", "modules"))
    if not (
        isinstance(files, dict)
        and isinstance(tensors, dict)
        and all(_has(row, TENSOR_KEYS) and row["sources"] for row in tensors.values())
        and isinstance(modules, list)
        and all(_has(row, MODULE_KEYS) for row in modules)
    ):
        raise CheckpointError(f"{path}: lacks files, tensors or modules as kvq writes them. Quantize again.")
    return manifest


def _has(row: Any, keys: Iterable[str]) -> bool:
    return isinstance(row, dict) and all(key in row for key in keys)


def check_files(folder: Path, manifest: Mapping[str, Any] | None) -> Check:
    """Every file has the hash that the manifest says, and there is no other."""
    check = Check("files")
    if manifest is None:
        check.note = f"no {MANIFEST_NAME}: hashes not checked"
        return check
    listed: Mapping[str, str] = manifest.get("files", {})
    for name, expected in listed.items():
        path = folder / name
        present = path.is_file()
        check.expect(present, f"{name} is missing")
        if present:
            check.expect(sha256_file(path) == expected, f"{name} has changed since it was written (sha256 differs)")
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in listed and name != MANIFEST_NAME:
            check.expect(not name.endswith(".safetensors"), f"{name} is not listed in the manifest")
    return check


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
    """Scales are finite and positive; no tensor holds NaN or Inf; packed parts fit each other."""
    check = Check("values")
    for name in reader.index.tensors:
        try:
            value = reader.tensor(name)
        except CheckpointError as error:
            check.expect(False, str(error))
            continue
        if name.endswith((".weight_scale", ".weight_scale_inv")):
            check.expect(bool((value > 0).all()), f"{name} holds a scale that is not positive")
        elif name.endswith(".weight_packed"):
            _expect_parts(check, reader, name.removesuffix(".weight_packed"))
        else:
            check.num_checked += 1
    return check


def _expect_parts(check: Check, reader: CheckpointReader, module: str) -> None:
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


def check_experts(reader: CheckpointReader, facts: ModelFacts) -> Check:
    """Every routed expert of every MoE layer is packed, the MTP layer's too, and none is left unquantized."""
    check = Check("experts")
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
        for name in (*MTP_TENSORS, "mlp.gate.weight", "mlp.gate.e_score_correction_bias", "self_attn.o_proj.weight"):
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
    broken = [entry for entry in (*packed_targets, *ignore) if not _compiles(entry)]
    for entry in broken:
        check.expect(False, f"{entry!r} is no regular expression")
    if broken:
        return check
    for module, kind in modules.items():
        if kind == "packed":
            check.expect(matches_any(module, packed_targets), f"no INT4 group covers {module}")
        elif kind == "fp8":
            check.expect(fp8 and not matches_any(module, ignore), f"{module} is FP8, which the config does not say")
        elif fp8:
            check.expect(matches_any(module, ignore), f"{module} is not quantized, but the config does not ignore it")
    for entry in ignore:
        check.expect(any(matches_any(module, [entry]) for module in modules), f"ignore entry {entry!r} names no module")
    return check


def _expect_parses(check: Check, described: Mapping[str, Any]) -> bool:
    """compressed-tensors' own opinion; what it accepts has groups with targets, all of them text."""
    from compressed_tensors.quantization import QuantizationConfig

    try:
        QuantizationConfig.model_validate(dict(described))
        parsed = ""
    except ValueError as error:
        parsed = " ".join(str(error).split())
    check.expect(not parsed, f"compressed-tensors refuses the quantization_config: {parsed}")
    return not parsed


def _compiles(entry: str) -> bool:
    try:
        re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
    except re.error:
        return False
    return True


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


def matches_any(module: str, entries: Iterable[str]) -> bool:
    """compressed-tensors' rule for targets and ignore lists: the full name, or `re:` and a pattern from its start."""
    return any(re.match(e[3:], module) if e.startswith("re:") else e == module for e in entries)


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
    checks = [
        files,
        check_index(reader),
        check_plan(reader, manifest),
        check_values(reader),
        check_experts(reader, facts),
    ]
    checks += [check_mtp(reader, facts)]
    if manifest is None or not manifest.get("pass_through"):
        checks.append(check_config(reader, facts))
    return checks

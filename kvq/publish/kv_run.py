"""Calibrate, compare, choose and write: the stages of `kvq calibrate-kv`, and what `kvq quantize` shares with them.

serving/kv_cache_scales.json    every scale
kvq-reports/kv.json             statistics, errors, decision, what engines do
model-kv-scales.safetensors     and a kv_cache_scheme in config.json: only where the target uses them, see kv_delivery
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.dataset import TokenSet, load_documents, load_packed
from kvq.calibration.forward import ModelRunner, check_complete
from kvq.calibration.kv_calibrate import gather_statistics
from kvq.calibration.kv_stats import KvStatistics
from kvq.calibration.rows import Place
from kvq.checkpoint.architecture import ModelFacts
from kvq.checkpoint.formats import find_quantization_config
from kvq.checkpoint.index import MANIFEST_NAME, load_json
from kvq.checkpoint.reader import CheckpointReader
from kvq.checkpoint.source import Source
from kvq.checkpoint.writer import CheckpointWriter, bytes_of, check_output, check_outside, dump_json
from kvq.publish.kv_scales import SCALES_FILE, ChosenScales, choose_scales, kv_report, scale_sets, scales_file
from kvq.publish.manifest import manifest_text
from kvq.publish.serving_files import SERVING_FOLDER
from kvq.verify.kv_choice import ONE, KvComparison, compare_scales
from kvq.verify.kv_delivery import KV_CACHE_SCHEME, Target, checkpoint_names, known_target
from kvq.verify.report_file import find_report
from kvq.verify.report_files import HEAD, KV, REPORTS, checkpoint_identity, report_folder, write_json, write_report

REPORT_NAME = "kv"
REPORT_FILE = f"{REPORTS}/{REPORT_NAME}.json"
SCALES_SHARD = "model-kv-scales.safetensors"


@dataclass(frozen=True, slots=True)
class KvRequest:
    """What `kvq calibrate-kv` was asked."""

    source: Source
    out: Path
    target: Target
    calibration: Place | None
    held_out: Place | None
    num_samples: int
    max_seq_length: int
    max_rows: int | None


@dataclass(frozen=True, slots=True)
class KvResult:
    """The report, and the files that were written below the output folder."""

    report: dict[str, Any]
    files: list[str]


def calibrate_kv_scales(request: KvRequest, device: torch.device, stage: Callable[[str], None]) -> KvResult:
    """Raises CheckpointError, CalibrationError or OutputError; nothing is written before all is measured."""
    _check_place(request.out, request.source.folder)
    reader = CheckpointReader(request.source.folder)
    runner = ModelRunner(reader, device)
    facts = runner.facts
    check_complete(reader, facts)
    find_report(report_folder(request.out), REPORT_NAME, KV)  # one that cannot be added to is refused before the work
    copies = bool(_deliverable(reader, facts, request.target))
    if copies:
        check_output(request.out, bytes_of(reader.folder / shard for shard in reader.index.shards))
    vocab_size = int(facts.text_config["vocab_size"])
    tokens = load_packed(reader.folder, vocab_size, request.calibration, request.num_samples, request.max_seq_length)
    statistics = gather_statistics(runner, tokens.tokens_NS, lambda text: stage(f"calibrating, {text}"))
    comparison: KvComparison | None = None
    if request.held_out is not None:
        documents = load_documents(
            reader.folder, vocab_size, request.held_out, request.max_rows, request.max_seq_length
        )
        comparison = compare_scales(
            runner, documents, scale_sets(statistics), lambda text: stage(f"comparing on held-out tokens, {text}")
        )
    choice = choose_scales(statistics, comparison)
    report = kv_report(facts, statistics, choice, comparison, request.target)
    copied = copies and choice.chosen != ONE
    if copied:
        stage("writing the checkpoint with scales")
        copy_with_scales(reader, facts, choice, request)
    files = {SCALES_FILE: scales_file(facts, choice, tokens), REPORT_FILE: report}
    write_kv_files(request.out, request.out if copied else request.source.folder, files)
    return KvResult(report, [*files, *([SCALES_SHARD] if copied else [])])


def _check_place(out: Path, source: Path) -> None:
    """Beside the source, or into a checkpoint that kvq made, whose own report this is."""
    if out.resolve() != source.resolve() or not (source / MANIFEST_NAME).is_file():
        check_outside(out, source)


def write_kv_files(folder: Path, checkpoint: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """The two side files, about a checkpoint. What else `kv.json` holds of the same weights (simulations of
    `kvq evaluate`) stays."""
    reports = report_folder(folder)
    before = find_report(reports, REPORT_NAME, KV)
    kept: Mapping[str, Any] = {}
    if before is not None and before.value.get(HEAD[-1]) == checkpoint_identity(checkpoint):
        kept = {key: value for key, value in before.value.items() if key not in HEAD}
    write_json(folder / SCALES_FILE, files[SCALES_FILE])
    write_report(reports, REPORT_NAME, KV, checkpoint, {**kept, **files[REPORT_FILE]})


def scale_tensors(facts: ModelFacts, choice: ChosenScales, target: Target) -> dict[str, Tensor]:
    """Tensors for the checkpoint, float32 of one value: those that the target uses, none when 1.0 was chosen."""
    if choice.chosen == ONE:
        return {}
    names = checkpoint_names(target, facts.arch.attention)
    return {
        facts.layer_prefix(layer) + names[scale_name]: torch.tensor([scale], dtype=torch.float32)
        for layer, row in choice.scales.items()
        if layer < facts.num_layers  # what engines do with a draft layer's scales is not known
        for scale_name, scale in row.items()
        if scale_name in names
    }


def manifest_rows(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """What the manifest says of them."""
    return {
        name: {"dtype": "F32", "shape": list(tensor.shape), "action": "kv_scale", "class": "KV scales",
               "shard": SCALES_SHARD, "sources": [name]}
        for name, tensor in tensors.items()
    }  # fmt: skip


def with_scheme(quantization: Mapping[str, Any]) -> dict[str, Any]:
    return {**quantization, "kv_cache_scheme": dict(KV_CACHE_SCHEME)}


def _deliverable(reader: CheckpointReader, facts: ModelFacts, target: Target) -> Mapping[str, str]:
    """Names for the checkpoint's scales; empty where its config cannot announce them."""
    described = find_quantization_config(reader.config) or {}
    if described.get("quant_method") != "compressed-tensors":
        return {}
    return checkpoint_names(target, facts.arch.attention)


def copy_with_scales(reader: CheckpointReader, facts: ModelFacts, choice: ChosenScales, request: KvRequest) -> None:
    """The same checkpoint, byte for byte, with the scales and the scheme that announces them."""
    tensors = scale_tensors(facts, choice, request.target)
    with CheckpointWriter(request.out) as writer:
        for shard in reader.index.shards:
            writer.copy_file(reader.folder, Path(shard))
        writer.weight_map = {name: info.shard for name, info in reader.index.tensors.items()}
        writer.total_size = reader.index.total_bytes
        writer.add_shard(SCALES_SHARD, dict(tensors))  # it empties what it is given
        for path in reader.side_files():
            if path.name not in ("config.json", MANIFEST_NAME) and path.parts[0] not in (SERVING_FOLDER, REPORTS):
                writer.copy_file(reader.folder, path)
        writer.add_text("config.json", dump_json(_scheme_into(reader.config, facts)))
        writer.add_index()
        manifest_path = reader.folder / MANIFEST_NAME
        if manifest_path.exists():
            manifest = load_json(manifest_path)
            manifest["tensors"] |= manifest_rows(tensors)
            manifest["files"] = dict(sorted(writer.sha256.items()))
            writer.add_text(MANIFEST_NAME, manifest_text(manifest))
        writer.publish()


def _scheme_into(config: Mapping[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """The config with a kv_cache_scheme where its quantization_config is."""
    result = dict(config)
    key = facts.arch.text_config
    if "quantization_config" in result:
        result["quantization_config"] = with_scheme(result["quantization_config"])
    elif key is not None:
        result[key] = {**result[key], "quantization_config": with_scheme(result[key]["quantization_config"])}
    return result


@dataclass(frozen=True, slots=True)
class KvStage:
    """What `kvq quantize` adds for the KV cache; empty where it gathered no statistics."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def add_tensors(self, writer: CheckpointWriter) -> None:
        if self.tensors:
            writer.add_shard(SCALES_SHARD, dict(self.tensors))  # it empties what it is given

    def announced(self, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
        """The quantization_config, with a scheme where scales are delivered."""
        return with_scheme(quantization) if self.tensors else quantization

    def manifest_rows(self) -> dict[str, dict[str, Any]]:
        return manifest_rows(self.tensors)

    def write_files(self, folder: Path) -> None:
        """The side files, which the manifest does not list: they may be measured anew."""
        if self.files:
            write_kv_files(folder, folder, self.files)


def kv_stage(facts: ModelFacts, statistics: KvStatistics, tokens: TokenSet | None, target: str) -> KvStage:
    """The choice of a run that has no held-out data, and what it writes."""
    engine = known_target(target)
    if tokens is None or not statistics.layers:
        return KvStage()
    choice = choose_scales(statistics, None)
    report = kv_report(facts, statistics, choice, None, engine)
    files = {SCALES_FILE: scales_file(facts, choice, tokens), REPORT_FILE: report}
    return KvStage(scale_tensors(facts, choice, engine), files)

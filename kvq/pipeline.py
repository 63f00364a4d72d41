"""The stages in order; the only place where they meet.

reader -> plan -> calibration forward -> solver -> packer -> writer -> manifest
"""

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from kvq.calibration.activations import ActivationStore
from kvq.calibration.dataset import TokenSet, load_packed
from kvq.calibration.experts import RoutingRecorder, sort_by_expert
from kvq.calibration.forward import ModelRunner, check_complete, pick_device
from kvq.checkpoint.dequant import load_weight
from kvq.checkpoint.index import MANIFEST_NAME
from kvq.checkpoint.reader import CheckpointReader
from kvq.checkpoint.source import Source
from kvq.checkpoint.writer import CheckpointWriter, bytes_of, check_output, dump_json
from kvq.errors import CalibrationError, OutputError, QuantizationError
from kvq.publish.manifest import RunRecord, build_manifest, manifest_text
from kvq.quantize.experts import Capture, LayerSolver, SolvedLayer
from kvq.quantize.types import FALLBACKS, ModuleResult
from kvq.recipes.plan import QuantPlan, TensorPlan, resolve_plan
from kvq.recipes.schema import Recipe
from kvq.recipes.scheme import output_config

# The source's model card says things that are no longer true of the output.
RENAMED_SIDE_FILES = {"README.md": "SOURCE_README.md"}
WRITTEN_BY_KVQ = ("config.json", MANIFEST_NAME)


class Progress(Protocol):
    """What a run tells while it goes on."""

    def stage(self, layer: int | None, num_layers: int, text: str) -> None: ...

    def layer_done(self, layer: int, num_layers: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check that needs no weights."""

    source: Source
    reader: CheckpointReader
    plan: QuantPlan
    out: Path
    device: torch.device
    target: str
    calibration: Path | None

    @property
    def side_files(self) -> list[Path]:
        return [path for path in self.reader.side_files() if str(path) not in WRITTEN_BY_KVQ]


def prepare(
    source: Source,
    recipe: Recipe,
    out: Path,
    *,
    device: str = "auto",
    target: str = "sglang",
    calibration: Path | None = None,
) -> Prepared:
    """Plan the run and check the place to write. Raises the error that the run would die of, before it starts."""
    chosen = pick_device(device)
    reader = CheckpointReader(source.folder)
    plan = resolve_plan(recipe, reader.config, reader.index)
    if not plan.pass_through:
        check_complete(reader, plan.facts)
    prepared = Prepared(source, reader, plan, out, chosen, target, calibration)
    if out.resolve().is_relative_to(source.folder.resolve()):
        raise OutputError(
            f"{out} lies inside the source {source.folder}, which kvq never changes. Choose another --out."
        )
    side_bytes = bytes_of(source.folder / path for path in prepared.side_files)
    check_output(out, plan.output_bytes + side_bytes)
    return prepared


def quantize_checkpoint(prepared: Prepared, progress: Progress) -> dict[str, object]:
    """Run it. Gives the manifest that was written. An error leaves `<out>.partial` and no `<out>`."""
    run = Run(prepared, CheckpointWriter(prepared.out), progress)
    run.load_calibration()  # before anything is written
    with run.writer:
        if prepared.plan.pass_through:
            run.copy_shards()
        else:
            run.quantize()
        return run.finish()


@dataclass(eq=False)
class Run:
    """One run's moving parts: what is open, what has been learnt so far."""

    prepared: Prepared
    writer: CheckpointWriter
    progress: Progress
    results: list[ModuleResult] = field(default_factory=list)
    tokens: TokenSet | None = None

    @property
    def plan(self) -> QuantPlan:
        return self.prepared.plan

    def copy_shards(self) -> None:
        """Models that are INT4 already: the same shards under the same names."""
        reader = self.prepared.reader
        for number, shard in enumerate(reader.index.shards):
            self.progress.stage(None, len(reader.index.shards), f"copying {shard}")
            self.writer.copy_file(reader.folder, Path(shard))
            self.progress.layer_done(number, len(reader.index.shards))
        self.writer.weight_map = {name: tensor.shard for name, tensor in self.plan.tensors.items()}
        self.writer.total_size = self.plan.output_bytes

    def quantize(self) -> None:
        facts, reader = self.plan.facts, self.prepared.reader
        shards = self.plan.shard_tensors()
        by_layer = {facts.layer_of(tensors[0].name): (shard, tensors) for shard, tensors in shards.items()}
        runner = ModelRunner(reader, self.prepared.device)
        store = None if self.tokens is None else runner.embed(self.tokens.tokens_NS)
        total = facts.num_layers + facts.num_mtp_layers
        self.progress.stage(None, total, "writing embeddings and head")
        self._write_shard(*by_layer[None], {})
        for layer in range(total):
            solved = self._layer(runner, layer, store)
            self._note_results(solved.results)
            self.progress.stage(layer, total, "writing")
            self._write_shard(*by_layer[layer], solved.tensors)
            reader.release()
            self.progress.layer_done(layer, total)

    def load_calibration(self) -> None:
        """The data, where it is needed."""
        recipe = self.plan.recipe
        if self.plan.pass_through or not recipe.needs_calibration:
            return
        vocab_size = int(self.plan.facts.text_config["vocab_size"])
        self.tokens = load_packed(
            self.prepared.reader.folder,
            vocab_size,
            self.prepared.calibration,
            recipe.num_calibration_samples,
            recipe.max_seq_length,
        )

    def _layer(self, runner: ModelRunner, layer: int, store: ActivationStore | None) -> SolvedLayer:
        """Forward (where data is used), solve, and leave the layer's output in the store."""
        facts, total = self.plan.facts, self.plan.facts.num_layers + self.plan.facts.num_mtp_layers
        recipe = self.plan.recipe
        if layer in facts.mtp_layers:
            calibrated = store is not None and recipe.mtp == "gptq"
            store = self._mtp_store(runner, layer, store) if calibrated else None
            recipe = recipe if calibrated else recipe.model_copy(update={"solver": "rtn"})
        capture = None
        if store is not None:
            self.progress.stage(layer, total, "reading and running")
            capture = self._forward(runner, layer, store)
        if layer not in facts.moe_layers:
            return SolvedLayer()
        solver = LayerSolver(
            runner, recipe, layer, facts.num_experts, lambda e, p: facts.expert_module(layer, e, p),
            self.prepared.device, capture, lambda text: self.progress.stage(layer, total, text),
        )  # fmt: skip
        solved = solver.solve()
        if store is not None and solved.output_TH is not None:
            _add_experts(store, solved.output_TH)
        return solved

    def _mtp_store(self, runner: ModelRunner, layer: int, store: ActivationStore | None) -> ActivationStore:
        assert store is not None and self.tokens is not None
        return runner.mtp_input(layer, self.tokens.tokens_NS, store)

    def _forward(self, runner: ModelRunner, layer: int, store: ActivationStore) -> Capture | None:
        recorder = RoutingRecorder()
        module: nn.Module = runner.build_layer(layer, recorder)
        runner.run(module, layer, store)
        if layer not in self.plan.facts.moe_layers:
            return None
        routing = sort_by_expert(
            torch.cat(recorder.expert_TK), torch.cat(recorder.weight_TK), self.plan.facts.num_experts
        )
        return Capture(torch.cat(recorder.x_TH), routing)

    def _note_results(self, results: list[ModuleResult]) -> None:
        """Keep results and stop as soon as more modules fell back than the recipe allows."""
        self.results += results
        failed = [result for result in self.results if result.outcome in FALLBACKS]
        allowed = self.plan.recipe.max_fallback_frac
        if len(failed) > allowed * self.plan.num_modules:
            raise QuantizationError(
                f"{len(failed)} of {self.plan.num_modules} modules fell back to round-to-nearest (allowed "
                f"{allowed:.1%}); the "
                f"first is {failed[0].name}, {failed[0].outcome}, {failed[0].num_tokens} tokens. Give more "
                f"calibration data, "
                "raise dampening_frac or max_fallback_frac with --set, or use --set solver=rtn."
            )

    def _write_shard(self, shard: str, tensors: list[TensorPlan], packed: Mapping[str, Tensor]) -> None:
        written = {tensor.name: self._make(tensor, packed) for tensor in tensors}
        self.writer.add_shard(shard, written)

    def _make(self, tensor: TensorPlan, packed: Mapping[str, Tensor]) -> Tensor:
        if tensor.action == "pack":
            value = packed[tensor.name]
        elif tensor.action == "dequantize":
            module = tensor.name.removesuffix(".weight")
            value = load_weight(self.prepared.reader, self.plan.source, module).to(torch.bfloat16)
        else:
            value = self.prepared.reader.tensor(tensor.sources[0])
        assert tuple(value.shape) == tensor.shape, f"{tensor.name}: planned {tensor.shape}, made {tuple(value.shape)}"
        return value

    def finish(self) -> dict[str, object]:
        """Side files, index, config, manifest; then the folder's name."""
        reader, plan = self.prepared.reader, self.plan
        for path in self.prepared.side_files:
            self.writer.copy_file(reader.folder, path, RENAMED_SIDE_FILES.get(str(path)))
        if plan.quantization_config is None:
            self.writer.copy_file(reader.folder, Path("config.json"))
        else:
            config = output_config(reader.config, plan.quantization_config, plan.facts.arch.text_config)
            self.writer.add_text("config.json", dump_json(config))
        self.writer.add_index()
        record = RunRecord(self.prepared.source, self.prepared.target, str(self.prepared.device.type), self.tokens)
        manifest = build_manifest(plan, record, self.results, self.writer.sha256)
        self.writer.add_text(MANIFEST_NAME, manifest_text(manifest))
        self.writer.publish()
        return manifest


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Most bytes that this process held, on the host (resident) and on the device (allocated)."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"peak_host_bytes": kilobytes * 1024, "peak_device_bytes": on_device}


def _add_experts(store: ActivationStore, output_TH: Tensor) -> None:
    """Add the experts' part to a layer output that was computed without it, rounding once."""
    length = store.hidden_NSH.shape[1]
    for batch in store.batches():
        rows = output_TH[batch.start * length : batch.stop * length]
        base = store.read(batch, output_TH.device)
        total = (base.float() + rows.reshape(base.shape)).to(base.dtype)
        if not bool(torch.isfinite(total).all()):
            raise CalibrationError("the experts' output is NaN or Inf; look at the source's weights and the data.")
        store.write(batch, total)

"""The stages in order; the only place where they meet.

reader -> plan -> calibration forward -> solver -> packer -> writer -> manifest
"""

import hashlib
import json
import resource
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from kvq import __version__
from kvq.calibration.activations import ActivationStore
from kvq.calibration.dataset import TokenSet, load_packed, read_rows
from kvq.calibration.experts import RoutingRecorder, sort_by_expert
from kvq.calibration.forward import ModelRunner, check_complete, pick_device
from kvq.calibration.kv_calibrate import watch_layer
from kvq.calibration.kv_stats import KvStatistics
from kvq.checkpoint.dequant import load_weight
from kvq.checkpoint.desk import WritingDesk
from kvq.checkpoint.index import MANIFEST_NAME
from kvq.checkpoint.journal import Journal, Step, can_continue, keeps_state
from kvq.checkpoint.reader import CheckpointReader
from kvq.checkpoint.source import Source
from kvq.checkpoint.writer import CheckpointWriter, bytes_of, check_output, dump_json, partial_of
from kvq.errors import CalibrationError, CheckpointError, OutputError, QuantizationError, StoppedError
from kvq.publish.kv_run import KvStage, kv_stage
from kvq.publish.manifest import RunRecord, build_manifest, manifest_text, package_versions
from kvq.quantize.chunks import expert_chunks
from kvq.quantize.experts import GATE_UP, Capture, LayerSolver, SolvedLayer
from kvq.quantize.types import FALLBACKS, ModuleResult
from kvq.recipes.plan import QuantPlan, TensorPlan, resolve_plan
from kvq.recipes.schema import Recipe
from kvq.recipes.scheme import output_config
from kvq.stop import StopRequest

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
    if calibration is not None and (plan.pass_through or not recipe.needs_calibration):
        plan = replace(
            plan, warnings=(*plan.warnings, f"{calibration.name} is not used: nothing here needs calibration data")
        )
    if not plan.pass_through:
        check_complete(reader, plan.facts)
    prepared = Prepared(source, reader, plan, out, chosen, target, calibration)
    if out.resolve().is_relative_to(source.folder.resolve()):
        raise OutputError(
            f"{out} lies inside the source {source.folder}, which kvq never changes. Choose another --out."
        )
    _check_writable_later(prepared)
    side_bytes = bytes_of(source.folder / path for path in prepared.side_files)
    check_output(out, plan.output_bytes + side_bytes)
    return prepared


def _check_writable_later(prepared: Prepared) -> None:
    """What is written last must be known to work at the start: side files, and the new config as JSON."""
    for path in prepared.side_files:
        try:
            with (prepared.source.folder / path).open("rb") as file:
                file.read(1)
        except OSError as error:
            raise CheckpointError(f"{prepared.source.folder / path}: cannot be read ({error.strerror}).") from None
    try:
        dump_json(prepared.reader.config).encode()
    except ValueError as error:
        raise CheckpointError(
            f"{prepared.source.folder / 'config.json'}: holds a value that JSON in UTF-8 cannot ({error}). Mend it."
        ) from None
    if prepared.plan.recipe.needs_calibration and not prepared.plan.pass_through:
        read_rows(prepared.calibration)


def quantize_checkpoint(
    prepared: Prepared, progress: Progress, *, restart: bool = False, stop: StopRequest | None = None
) -> dict[str, object]:
    """Run it, or go on with a run of the same fingerprint. Gives the manifest that was written.

    An error or a stop leaves `<out>.partial` and no `<out>`; `restart` discards what an earlier run left.
    """
    tokens = _load_calibration(prepared)  # before anything is written
    partial = partial_of(prepared.out)
    if restart and partial.exists() and can_continue(partial):
        shutil.rmtree(partial)
    if prepared.plan.pass_through:
        run = Run(prepared, CheckpointWriter(prepared.out), progress, stop=stop)
        with run.writer:
            run.copy_shards()
            return run.finish()
    journal = Journal(partial)
    journal.begin(_fingerprint(prepared, tokens))
    run = Run(prepared, CheckpointWriter(prepared.out, journal), progress, tokens=tokens, stop=stop)
    with run.writer:
        run.quantize(journal)
        return run.finish()


def _load_calibration(prepared: Prepared) -> TokenSet | None:
    """The data, where it is needed."""
    plan = prepared.plan
    if plan.pass_through or not plan.recipe.needs_calibration:
        return None
    return load_packed(
        prepared.reader.folder, int(plan.facts.text_config["vocab_size"]), prepared.calibration,
        plan.recipe.num_calibration_samples, plan.recipe.max_seq_length,
    )  # fmt: skip


def _fingerprint(prepared: Prepared, tokens: TokenSet | None) -> dict[str, object]:
    """All that the output depends on. A difference in any of these forbids going on with a run."""
    folder, index = prepared.reader.folder, prepared.reader.index
    sizes = {shard: (folder / shard).stat().st_size for shard in index.shards}
    layout = {name: [info.shard, info.dtype, info.shape, info.offset] for name, info in sorted(index.tensors.items())}
    described = json.dumps([sizes, layout, prepared.reader.config], sort_keys=True)
    return {
        "kvq version": __version__,
        "package versions": package_versions(),
        "recipe": prepared.plan.recipe.sha256,
        "source": [prepared.source.name, prepared.source.revision],
        "source files": hashlib.sha256(described.encode()).hexdigest(),
        "calibration data": None if tokens is None else [tokens.name.rsplit("/", 1)[-1], tokens.sha256],
        "device": prepared.device.type,
        "target": prepared.target,
    }


@dataclass(eq=False)
class Run:
    """One run's moving parts: what is open, what has been learnt so far."""

    prepared: Prepared
    writer: CheckpointWriter
    progress: Progress
    results: list[ModuleResult] = field(default_factory=list)
    tokens: TokenSet | None = None
    stop: StopRequest | None = None
    kv: KvStatistics | None = None
    desk: WritingDesk = field(init=False)

    def __post_init__(self) -> None:
        self.desk = WritingDesk(behind=self.prepared.device.type == "cuda")

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
            self._stop_if_asked(f"Stopped after shard {number + 1} of {len(reader.index.shards)}.")
        self.writer.weight_map = {name: tensor.shard for name, tensor in self.plan.tensors.items()}
        self.writer.total_size = self.plan.output_bytes

    def quantize(self, journal: Journal) -> None:
        """Step 0 writes what lies outside the layers, step n + 1 does layer n. Finished steps are taken over."""
        facts, reader = self.plan.facts, self.prepared.reader
        shards = self.plan.shard_tensors()
        by_layer = {facts.layer_of(tensors[0].name): (shard, tensors) for shard, tensors in shards.items()}
        runner = ModelRunner(reader, self.prepared.device)
        total = facts.num_layers + facts.num_mtp_layers
        self.results = [ModuleResult(**row) for step in journal.steps for row in step.results]
        store = None if self.tokens is None else runner.embed(self.tokens.tokens_NS)
        if store is not None and self.plan.recipe.kv_scales == "calibrate":
            self.kv = KvStatistics(facts.arch.attention)
            for step in journal.steps:
                self.kv.load(step.kv)
        if store is not None and journal.steps and journal.steps[-1].state is not None:
            store.restore(journal.load_state())
        if not journal.steps:
            self.progress.stage(None, total, "writing embeddings and head")
            self._finish_step(journal, 0, *by_layer[None], SolvedLayer(), None)
        with self.desk:
            for layer in range(len(journal.steps) - 1, total):
                solved = self._layer(runner, layer, store)
                self._note_results(solved.results)
                self.progress.stage(layer, total, "writing")
                self._write_behind(journal, layer + 1, *by_layer[layer], solved, store if layer + 1 < total else None)
                reader.release()
                self.progress.layer_done(layer, total)
                if layer + 1 < total:
                    self._stop_if_asked(f"Stopped after layer {layer + 1} of {total}.")

    def _write_behind(
        self, journal: Journal, number: int, shard: str, tensors: list[TensorPlan], solved: SolvedLayer,
        store: ActivationStore | None,
    ) -> None:  # fmt: skip
        """Write a layer that is done, beside the next one's work on a GPU. A state that is kept cannot wait: the next
        layer changes it."""
        if self.prepared.device.type == "cuda":
            torch.cuda.synchronize()  # packed tensors are copied without waiting
        self.desk.submit(lambda: self._finish_step(journal, number, shard, tensors, solved, store))
        if store is not None and keeps_state(number, store.nbytes):
            self.desk.settle()

    def _stop_if_asked(self, message: str) -> None:
        if self.stop is not None and self.stop.signal is not None:
            self.desk.settle()
            raise StoppedError(message, self.stop.signal)

    def _finish_step(
        self,
        journal: Journal,
        number: int,
        shard: str,
        tensors: list[TensorPlan],
        solved: SolvedLayer,
        store: ActivationStore | None,
    ) -> None:
        """Write the shard, then the record that makes it count."""
        written = {tensor.name: self._make(tensor, solved.tensors) for tensor in tensors}
        solved.tensors.clear()
        self.writer.add_shard(shard, written)
        kept = store if store is not None and keeps_state(number, store.nbytes) else None
        step = Step(
            number=number,
            shard=shard,
            sha256=self.writer.sha256[shard],
            tensors={tensor.name: tensor.nbytes for tensor in tensors},
            results=[asdict(result) for result in solved.results],
            state=None if kept is None else f"state-{number:05d}.safetensors",
            resumable=kept is store,
            kv={} if self.kv is None else self.kv.as_dict([number - 1]),
        )
        journal.finish_step(step, None if kept is None else kept.state())

    def _layer(self, runner: ModelRunner, layer: int, store: ActivationStore | None) -> SolvedLayer:
        """Forward (where data is used), solve, and leave the layer's output in the store."""
        facts, total = self.plan.facts, self.plan.facts.num_layers + self.plan.facts.num_mtp_layers
        recipe = self.plan.recipe
        if layer in facts.mtp_layers:
            calibrated = store is not None and recipe.mtp == "gptq"
            store = self._mtp_store(runner, layer, store) if calibrated else None
            recipe = recipe if calibrated else recipe.model_copy(update={"solver": "rtn"})
        moe = layer in facts.moe_layers
        chunks = expert_chunks(facts.num_experts, runner.device.type, *runner.gate_up_shape(layer)) if moe else []
        for first in chunks[:1]:
            runner.read_ahead(layer, first, GATE_UP)
        capture = None
        if store is not None:
            self.progress.stage(layer, total, "reading and running")
            capture = self._forward(runner, layer, store)
        if not moe:
            return SolvedLayer()
        if layer + 1 < total:
            runner.read_ahead_layer(layer + 1)
        solver = LayerSolver(
            runner, recipe, layer, facts.num_experts, chunks, lambda e, p: facts.expert_module(layer, e, p),
            self.prepared.device, capture, lambda text: self.progress.stage(layer, total, text),
        )  # fmt: skip
        solved = solver.solve()
        if store is not None and solved.output_TH is not None:
            _add_experts(store, solved.output_TH)
            solved.output_TH = None  # a quarter of a GPU, while the layer waits to be written
        return solved

    def _mtp_store(self, runner: ModelRunner, layer: int, store: ActivationStore | None) -> ActivationStore:
        assert store is not None and self.tokens is not None
        return runner.mtp_input(layer, self.tokens.tokens_NS, store)

    def _forward(self, runner: ModelRunner, layer: int, store: ActivationStore) -> Capture | None:
        recorder = RoutingRecorder()
        module: nn.Module = runner.build_layer(layer, recorder)
        if self.kv is not None:
            watch_layer(runner, module, layer, self.kv.observe)
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
        kv = KvStage() if self.kv is None else kv_stage(plan.facts, self.kv, self.tokens, self.prepared.target)
        kv.add_tensors(self.writer)
        if plan.quantization_config is None:
            self.writer.copy_file(reader.folder, Path("config.json"))
        else:
            quantization = kv.announced(plan.quantization_config)
            config = output_config(reader.config, quantization, plan.facts.arch.text_config)
            self.writer.add_text("config.json", dump_json(config))
        self.writer.add_index()
        record = RunRecord(self.prepared.source, self.prepared.target, str(self.prepared.device.type), self.tokens)
        manifest = build_manifest(plan, record, self.results, self.writer.sha256)
        manifest["tensors"] |= kv.manifest_rows()
        self.writer.add_text(MANIFEST_NAME, manifest_text(manifest))
        kv.write_files(self.writer.partial)
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

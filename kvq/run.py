"""One run over all layers: forward, solve, write, record. What a run needs comes from `pipeline.py`.

Shape suffixes: T = tokens, H = hidden size.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kvq.calibration.activations import ActivationStore
from kvq.calibration.dataset import TokenSet
from kvq.calibration.experts import RoutingRecorder, sort_by_expert
from kvq.calibration.forward import ModelRunner
from kvq.calibration.kv_hook import install_kv_hook
from kvq.calibration.kv_stats import KvStatistics
from kvq.calibration.rows import Place
from kvq.checkpoint.dequant import load_weight
from kvq.checkpoint.desk import WritingDesk
from kvq.checkpoint.index import MANIFEST_NAME, REPORTS
from kvq.checkpoint.journal import Journal, Step, keeps_state
from kvq.checkpoint.reader import CheckpointReader
from kvq.checkpoint.source import Source
from kvq.checkpoint.unchanged import SourceWatch
from kvq.checkpoint.writer import CheckpointWriter, dump_json
from kvq.errors import CalibrationError, OutputError, QuantizationError, StoppedError
from kvq.publish.card_metadata import CARD, SOURCE_CARD
from kvq.publish.events import Progress
from kvq.publish.kv_run import KvStage, kv_stage
from kvq.publish.manifest import RunRecord, build_manifest, manifest_text, printable
from kvq.publish.plan_report import output_kinds
from kvq.publish.serve import default_serving
from kvq.publish.served import served_from_plan, served_name
from kvq.publish.serving_files import SERVING_FOLDER
from kvq.quantize.capture import Capture
from kvq.quantize.chunks import expert_chunks
from kvq.quantize.experts import GATE_UP, LayerSolver, SolvedLayer
from kvq.quantize.types import FALLBACKS, ModuleResult
from kvq.ranks import Ranks
from kvq.recipes.plan import QuantPlan, TensorPlan
from kvq.recipes.scheme import output_config
from kvq.stop import StopRequest

# The source's model card says things that are no longer true of the output.
RENAMED_SIDE_FILES = {CARD: SOURCE_CARD}
WRITTEN_BY_KVQ = ("config.json", MANIFEST_NAME)
FOLDERS_OF_KVQ = (SERVING_FOLDER, REPORTS)  # of the output, not of what it was made from


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check that needs no weights."""

    source: Source
    reader: CheckpointReader
    plan: QuantPlan
    out: Path
    device: torch.device
    target: str
    calibration: Place | None
    watch: SourceWatch
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def side_files(self) -> list[Path]:
        files = (path for path in self.reader.side_files() if str(path) not in WRITTEN_BY_KVQ)
        return [path for path in files if path.parts[0] not in FOLDERS_OF_KVQ]

    @property
    def left_out(self) -> list[str]:
        """The source's folders that kvq writes itself in an output."""
        return sorted({path.parts[0] for path in self.reader.side_files()} & set(FOLDERS_OF_KVQ))


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

    def copy_shards(self, journal: Journal) -> None:
        """Models that are INT4 already: the same shards under the same names. Copied ones are taken over.

        In each step every rank copies one, as long as there are some.
        """
        shards, ranks = list(self.plan.shard_tensors().items()), self.prepared.ranks
        total = -(-len(shards) // ranks.size)
        for number in range(len(journal.steps), total):
            sizes: dict[str, int] = {}
            shard = ""
            if number * ranks.size + ranks.rank < len(shards):
                shard, tensors = shards[number * ranks.size + ranks.rank]
                sizes = {tensor.name: tensor.nbytes for tensor in tensors}
                self.progress.stage(None, total, f"copying {shard}")
                self.writer.copy_file(self.prepared.reader.folder, Path(shard))
                self.prepared.watch.check([shard])
                self.writer.note_shard(shard, sizes)
            journal.finish_step(Step(number, shard, self.writer.sha256.get(shard, ""), sizes, [], None), None)
            self.progress.layer_done(number, total)
            self._stop_if_asked(f"Stopped after step {number + 1} of {total}.")

    def quantize(self, journal: Journal) -> None:
        """Step 0 writes what lies outside the layers, step n + 1 does layer n. Finished steps are taken over."""
        facts, reader = self.plan.facts, self.prepared.reader
        by_layer = self.plan.layer_shards(self.prepared.ranks.rank)
        runner = ModelRunner(reader, self.prepared.device)
        total = facts.num_layers + facts.num_mtp_layers
        self.results = step_results(journal)
        store = None if self.tokens is None else runner.embed(self._own_tokens())
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
                self._note_results([row for rows in self.prepared.ranks.gather(solved.results) for row in rows])
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
        if store is not None and self._keeps_state(number, store):
            self.desk.settle()

    def _keeps_state(self, number: int, store: ActivationStore) -> bool:
        assert self.tokens is not None
        nbytes = store.nbytes // store.shape[0] * self.tokens.tokens_NS.shape[0]
        return keeps_state(number, nbytes, self.prepared.device.type)

    def _stop_if_asked(self, message: str) -> None:
        """All ranks stop when one was asked to."""
        signals = self.prepared.ranks.gather(None if self.stop is None else self.stop.signal)
        asked = next((signal for signal in signals if signal is not None), None)
        if asked is not None:
            self.desk.settle()
            raise StoppedError(message, asked)

    def _own_tokens(self) -> Tensor:
        """The sequences that this rank runs, [N, S]."""
        assert self.tokens is not None
        own = self.prepared.ranks.own(self.tokens.tokens_NS.shape[0])
        return self.tokens.tokens_NS[own.start : own.stop]

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
        if shard:
            self.writer.add_shard(shard, written)
        self.prepared.watch.check()
        kept = store if store is not None and self._keeps_state(number, store) else None
        step = Step(
            number=number,
            shard=shard,
            sha256=self.writer.sha256.get(shard, ""),
            tensors={tensor.name: tensor.nbytes for tensor in tensors},
            results=[asdict(result) for result in solved.results],
            state=None if kept is None else journal.state_name(number),
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
        own, fewest = self.prepared.ranks.own(facts.num_experts), facts.num_experts // self.prepared.ranks.size
        chunks = expert_chunks(own, fewest, runner.device.type, *runner.gate_up_shape(layer)) if moe else []
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
            add_experts(store, solved.output_TH)
            solved.output_TH = None  # a quarter of a GPU, while the layer waits to be written
        return solved

    def _mtp_store(self, runner: ModelRunner, layer: int, store: ActivationStore | None) -> ActivationStore:
        assert store is not None and self.tokens is not None
        return runner.mtp_input(layer, self._own_tokens(), store)

    def _forward(self, runner: ModelRunner, layer: int, store: ActivationStore) -> Capture | None:
        recorder = RoutingRecorder()
        module = runner.build_layer(layer, recorder)
        if self.kv is not None:
            install_kv_hook(module.self_attn, self.kv.attention, layer, self.kv.observe)
        runner.run(module, layer, store)
        if layer not in self.plan.facts.moe_layers:
            return None
        routing = sort_by_expert(
            torch.cat(recorder.expert_TK), torch.cat(recorder.weight_TK), self.plan.facts.num_experts
        )
        return Capture.of(torch.cat(recorder.x_TH), routing, self.prepared.ranks)

    def _note_results(self, results: list[ModuleResult]) -> None:
        """Keep results and stop as soon as more modules fell back than the recipe allows."""
        self.results += results
        failed = [result for result in self.results if result.outcome in FALLBACKS]
        allowed = self.plan.recipe.max_fallback_frac
        if len(failed) > allowed * self.plan.num_modules:
            raise QuantizationError(
                f"{len(failed)} of {self.plan.num_modules} modules fell back to round-to-nearest (allowed "
                f"{allowed:.1%}); the first is {failed[0].name}, {failed[0].outcome}, {failed[0].num_tokens} tokens. "
                "Give more calibration data, raise dampening_frac or max_fallback_frac with --set, or use --set "
                "solver=rtn."
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

    def finish(self, journal: Journal) -> dict[str, object]:
        """Side files, index, config, manifest; then the folder's name. Rank 0 does it when all ranks have written."""
        reader, plan, ranks = self.prepared.reader, self.plan, self.prepared.ranks
        ranks.gather(None)
        kv = None if self.kv is None else self.kv.of_all(ranks)
        if not ranks.first:
            return {}
        for steps in journal.all_steps()[1:]:
            for step in steps:
                self.writer.note_step(step)
        for path in self.prepared.side_files:
            self.writer.copy_file(reader.folder, path, RENAMED_SIDE_FILES.get(str(path)))
        stage = KvStage() if kv is None else kv_stage(plan.facts, kv, self.tokens, self.prepared.target)
        stage.add_tensors(self.writer)
        if plan.quantization_config is None:
            self.writer.copy_file(reader.folder, Path("config.json"))
        else:
            config = output_config(
                reader.config, stage.announced(plan.quantization_config), plan.facts.arch.text_config
            )
            self.writer.add_text("config.json", dump_json(config))
        self.writer.add_index()
        record = RunRecord(self.prepared.source, self.prepared.target, str(self.prepared.device.type), self.tokens)
        manifest = build_manifest(plan, record, self.results, self.writer.sha256)
        manifest["tensors"] |= stage.manifest_rows()
        self.writer.add_text(MANIFEST_NAME, manifest_text(manifest))
        self._add_serving()
        stage.write_files(self.writer.partial)
        self.writer.publish()
        return manifest

    def _add_serving(self) -> None:
        """How to serve it. After the manifest, which does not hash these files: they may be written anew."""
        source, plan = self.prepared.source, self.plan
        name = served_name(source.id if source.revision else printable(source.name), plan.recipe.name)
        served = served_from_plan(plan, output_kinds(plan), source.folder, self.prepared.reader.config, name)
        for file, text in default_serving(served).items():
            self.writer.add_text(f"{SERVING_FOLDER}/{file}", text)


def step_results(journal: Journal) -> list[ModuleResult]:
    """What finished steps have found."""
    try:
        together = zip(*journal.all_steps(), strict=True)
        return [ModuleResult(**row) for steps in together for step in steps for row in step.results]
    except TypeError:
        raise OutputError(f"{journal.folder}: a step's results are damaged. Add --restart to begin anew.") from None


def add_experts(store: ActivationStore, output_TH: Tensor) -> None:
    """Add the experts' part to a layer output that was computed without it, rounding once."""
    length, finite = store.shape[1], []
    for batch in store.batches():
        rows = output_TH[batch.start * length : batch.stop * length]
        base = store.read(batch, output_TH.device)
        total = (base.float() + rows.reshape(base.shape)).to(base.dtype)
        finite.append(torch.isfinite(total).all())
        store.write(batch, total)
    store.land()
    if not bool(torch.stack(finite).all()):  # after all of them, so that a GPU is not waited for between two batches
        raise CalibrationError("the experts' output is NaN or Inf; look at the source's weights and the data.")

"""ModelRunner: the source model one decoder layer at a time, on one device, with the memory of one layer.

Shape suffixes: B = sequences of a batch, N = all sequences, S = tokens per sequence, H = hidden size, E = experts,
I = expert width, J = 2 I, V = vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvq.calibration import transformers_door
from kvq.calibration.activations import ActivationStore, page_locked
from kvq.calibration.batches import BATCH_TOKENS
from kvq.calibration.sparse_attention import fit_indexer
from kvq.checkpoint.architecture import MTP_NORMS, ModelFacts, model_facts
from kvq.checkpoint.dequant import load_weight
from kvq.checkpoint.formats import detect_format
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CalibrationError, CheckpointError, RecipeError


def pick_device(name: str) -> torch.device:
    """`auto` takes CUDA where there is one. Raises RecipeError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"--device {name}: expected auto, cpu, cuda or cuda:N.") from None
    if device.type not in BATCH_TOKENS:
        raise RecipeError(f"--device {name}: kvq runs on cpu and cuda.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RecipeError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices here.")
    return device


def compute_dtype(device: torch.device) -> torch.dtype:
    """BF16 on GPUs, as the engines compute; float32 on CPUs, where BF16 products are emulated and 100 times slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def check_complete(reader: CheckpointReader, facts: ModelFacts) -> None:
    """Raise CheckpointError if a tensor that the run needs is absent or of another shape: now, not hours into it."""
    config = transformers_door.build_config(facts, reader.folder)
    transformers_door.build_rotary(facts.arch, config, torch.device("cpu"))
    for layer in range(facts.num_layers + facts.num_mtp_layers):
        state = transformers_door.build_layer(facts.arch, config, layer).state_dict()
        shapes = {name: tuple(value.shape) for name, value in state.items() if not name.startswith("mlp.experts.")}
        if layer in facts.mtp_layers:
            shapes |= _mtp_shapes(facts.hidden_size)
        for name, shape in shapes.items():
            _expect_shape(reader, facts.layer_prefix(layer) + name, shape)
    prefix, vocab_size = facts.arch.prefix, int(facts.text_config["vocab_size"])
    _expect_shape(reader, f"{prefix}model.norm.weight", (facts.hidden_size,))
    _expect_shape(reader, f"{prefix}model.embed_tokens.weight", (vocab_size, facts.hidden_size))
    if not facts.text_config.get("tie_word_embeddings"):
        _expect_shape(reader, f"{prefix}lm_head.weight", (vocab_size, facts.hidden_size))


def _mtp_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in MTP_NORMS}
    return {**shapes, "eh_proj.weight": (hidden, 2 * hidden)}


def _expect_shape(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> None:
    info = reader.index[name]
    if info.shape != shape:
        raise CheckpointError(
            f"{reader.folder / info.shard}: {name} is {list(info.shape)}, config.json calls for {list(shape)}. "
            "Is it from another release?"
        )


@dataclass(eq=False)
class ModelRunner:
    """Reads, fills and runs single layers. Weights leave with the returned module; only the rotary table stays."""

    reader: CheckpointReader
    device: torch.device
    facts: ModelFacts = field(init=False)

    def __post_init__(self) -> None:
        folder = self.reader.folder
        self.facts = model_facts(self.reader.config, folder)
        self.source = detect_format(self.reader.config, self.reader.index)
        self.dtype = compute_dtype(self.device)
        self.config = transformers_door.build_config(self.facts, folder)
        self.rotary = transformers_door.build_rotary(self.facts.arch, self.config, self.device)

    def weight(self, name: str) -> Tensor:
        """A tensor of the checkpoint by its full name, dequantized, on the device in the computing type."""
        index = self.reader.index
        module = name.removesuffix(".weight")
        stored_plain = name in index and index[name].dtype != "F8_E4M3"
        value = (
            self.reader.tensor(name)
            if stored_plain or module == name
            else load_weight(self.reader, self.source, module, self.device)
        )
        dtype = torch.float32 if name.endswith(self.facts.arch.float32) else self.dtype
        return value.to(self.device, dtype, non_blocking=True)

    def embed(self, tokens_NS: Tensor, name: str = "model.embed_tokens.weight") -> ActivationStore:
        """Hidden states before the first layer, on the host."""
        table_VH = self.reader.tensor(self.facts.arch.prefix + name)
        hidden_NSH = torch.empty(*tokens_NS.shape, table_VH.shape[1], dtype=self.dtype)
        for tokens_S, hidden_SH in zip(tokens_NS, hidden_NSH, strict=True):
            hidden_SH.copy_(F.embedding(tokens_S, table_VH))
        if self.device.type == "cuda":
            hidden_NSH = page_locked(hidden_NSH)
        return ActivationStore(hidden_NSH, max(1, BATCH_TOKENS[self.device.type] // tokens_NS.shape[1]))

    def build_layer(self, layer: int, experts: nn.Module) -> Any:
        """A decoder layer filled with the checkpoint's weights; its routed experts are replaced by `experts`."""
        module = transformers_door.build_layer(self.facts.arch, self.config, layer)
        if layer in self.facts.moe_layers:
            module.mlp.experts = experts
        prefix = self.facts.layer_prefix(layer)
        state = {key: self.weight(prefix + key) for key in module.state_dict()}
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False)
        return module

    def read_ahead(self, layer: int, experts: range, projections: Sequence[str]) -> None:
        """Begin to read what `expert_gate_up` or `expert_down` will be asked for. Pays only beside a GPU's work."""
        if self.device.type != "cuda":
            return
        modules = [self.facts.expert_module(layer, e, p) for e in experts for p in projections]
        self.reader.read_ahead(f"{module}.{part}" for module in modules for part in self._parts())

    def read_ahead_layer(self, layer: int) -> None:
        """Begin to read everything of a layer but its routed experts."""
        prefix = self.facts.layer_prefix(layer)
        if self.device.type == "cuda":
            names = (name for name in self.reader.index.tensors if name.startswith(prefix))
            self.reader.read_ahead(name for name in names if not name.startswith(f"{prefix}mlp.experts."))

    def gate_up_shape(self, layer: int) -> tuple[int, int]:
        """Rows and columns of what `expert_gate_up` gives for each expert."""
        rows, columns = self.reader.index[self.facts.expert_module(layer, 0, "gate_proj") + ".weight"].shape
        return 2 * rows, columns

    def _parts(self) -> tuple[str, ...]:
        return ("weight",) if self.source.scale_suffix is None else ("weight", self.source.scale_suffix)

    def expert_gate_up(self, layer: int, experts: range) -> Tensor:
        """Rows of gate_proj, then of up_proj, for each expert: [E, 2 I, H] in the computing type."""
        names = [[self.facts.expert_module(layer, e, p) + ".weight" for p in ("gate_proj", "up_proj")] for e in experts]
        return torch.stack([torch.cat([self.weight(name) for name in pair]) for pair in names])

    def expert_down(self, layer: int, experts: range) -> Tensor:
        """down_proj of each expert: [E, H, I] in the computing type."""
        return torch.stack([self.weight(self.facts.expert_module(layer, e, "down_proj") + ".weight") for e in experts])

    def run(
        self, module: Any, layer: int, store: ActivationStore, after: Callable[[slice], None] | None = None
    ) -> None:
        """Replace the hidden states in `store` by the layer's output. `after` is called when a batch is done.

        Raises CalibrationError when an output is not finite.
        """
        length = store.shape[1]
        position_ids = torch.arange(length, device=self.device).unsqueeze(0)
        if self.facts.arch.attention == "dsa":
            fit_indexer(module.self_attn, length)
        with torch.no_grad():
            rotary = self.rotary(torch.empty(1, dtype=self.dtype, device=self.device), position_ids)
            finite = []
            for batch in store.batches():
                output_BSH = self._forward(module, layer, store, batch, rotary)
                finite.append(torch.isfinite(output_BSH).all())
                store.write(batch, output_BSH)
                if after is not None:
                    after(batch)
            store.land()
        # After all of them, so that a GPU is not waited for between two batches.
        for batch, fine in zip(store.batches(), torch.stack(finite).tolist(), strict=True):
            if not fine:
                raise CalibrationError(
                    f"layer {layer} gives NaN or Inf for sequences {batch.start} to {batch.stop - 1} of the data: "
                    f"look at the weights in {self.reader.folder} (`kvq verify` it) and at these rows."
                )

    def _forward(self, module: Any, layer: int, store: ActivationStore, batch: slice, rotary: Tensor) -> Tensor:
        hidden_BSH = store.read(batch, self.device)
        if self.facts.arch.attention != "dsa":
            output: Tensor = module(hidden_BSH, attention_mask=None, position_embeddings=rotary)
            return output
        size, length = hidden_BSH.shape[:2]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        output, topk_BSK = module(
            hidden_BSH,
            attention_mask=causal.expand(size, 1, length, length),
            position_embeddings=rotary,
            prev_topk_indices=store.read_topk(batch, self.device, self.config.index_topk),
        )
        if self.config.indexer_types[layer] == "full":
            store.write_topk(batch, topk_BSK)
        return output

    def final_norm(self) -> nn.Module:
        name = self.facts.arch.prefix + "model.norm.weight"
        return transformers_door.build_norm(self.facts.arch, self.config, self.weight(name))

    def lm_head(self) -> Tensor:
        """[V, H]. Tied models have no tensor of their own."""
        prefix = self.facts.arch.prefix
        tied = f"{prefix}lm_head.weight" not in self.reader.index and bool(
            self.facts.text_config.get("tie_word_embeddings")
        )
        return self.weight(prefix + ("model.embed_tokens.weight" if tied else "lm_head.weight"))

    def mtp_input(self, layer: int, tokens_NS: Tensor, last: ActivationStore) -> ActivationStore:
        """What the draft layer reads at position i: eh_proj of the next token's embedding and the model's output at i.

        As in SGLang's and vLLM's deepseek-style MTP modules: the output is taken after the final norm; the last
        position, whose next token is not in the sequence, is dropped.
        """
        prefix = self.facts.layer_prefix(layer)
        own = f"{prefix}embed_tokens.weight"
        arch_prefix = self.facts.arch.prefix
        table = own.removeprefix(arch_prefix) if own in self.reader.index else "model.embed_tokens.weight"
        store = self.embed(tokens_NS[:, 1:], table)
        norm = self.final_norm()
        enorm, hnorm = (
            transformers_door.build_norm(self.facts.arch, self.config, self.weight(f"{prefix}{name}.weight"))
            for name in ("enorm", "hnorm")
        )
        eh_proj = self.weight(f"{prefix}eh_proj.weight")
        with torch.no_grad():
            for batch in store.batches():
                hidden = hnorm(norm(last.read(batch, self.device)[:, :-1]))
                joined = torch.cat([enorm(store.read(batch, self.device)), hidden], dim=-1)
                store.write(batch, F.linear(joined, eh_proj))
        store.land()
        last.land()
        return store

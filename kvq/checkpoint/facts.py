"""Published checkpoints without their files: every tensor's name, dtype and shape from config and source format.

The configs lie in `known/`, one file an alias, with the source of each and what is assumed beside it. Sizes derived
here meet the published ones (tests/publish/test_published_figures.py); docs/plan.md says where they do not.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kvq.checkpoint.architecture import MTP_NORMS, PROJECTIONS, ModelFacts, model_facts
from kvq.checkpoint.formats import CODES_PER_WORD, detect_format
from kvq.checkpoint.header import TensorInfo, tensor_bytes
from kvq.checkpoint.index import CheckpointIndex
from kvq.errors import CheckpointError

KNOWN = resources.files("kvq.checkpoint") / "known"
SHARD = "facts"  # no file of that name: facts say what there is, not which file holds it

Spec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """A published checkpoint as far as it is known: its config, where that was read, what is assumed about the rest."""

    alias: str
    hub: str
    config: Mapping[str, Any]
    sources: tuple[str, ...]
    assumed: tuple[str, ...]
    published: Mapping[str, int]
    mtp_has_embeddings: bool = False


def known_aliases() -> list[str]:
    """Aliases whose facts ship with kvq."""
    return sorted(item.name.removesuffix(".json") for item in KNOWN.iterdir() if item.name.endswith(".json"))


def known_checkpoint(alias: str) -> KnownCheckpoint:
    """Raises CheckpointError for an alias whose config could not be established from a source."""
    if alias not in known_aliases():
        raise CheckpointError(
            f"{alias}: facts not shipped: no source for its config was found, and kvq does not guess. Give its folder "
            f"or its Hub id instead. Facts ship for {', '.join(known_aliases())}."
        )
    row = json.loads((KNOWN / f"{alias}.json").read_text(encoding="utf-8"))
    return KnownCheckpoint(
        alias, row["hub"], row["config"], tuple(row["sources"]), tuple(row["assumed"]), row["published"],
        row.get("mtp_has_embeddings", False),
    )  # fmt: skip


def published_index(known: KnownCheckpoint, bf16: bool = False) -> CheckpointIndex:
    """All tensors of the published checkpoint, or of its BF16 sibling; offsets and shards mean nothing here."""
    config = {key: value for key, value in known.config.items() if key != "quantization_config" or not bf16}
    place = Path(known.alias)
    maker = _Maker.of(config, model_facts(config, place), known.mtp_has_embeddings)
    tensors = {
        name: TensorInfo(name, dtype, shape, SHARD, 0, tensor_bytes(dtype, shape))
        for name, dtype, shape in maker.tensors()
    }
    notes = tuple(f"assumed, not read anywhere: {line}" for line in known.assumed)
    return CheckpointIndex(place, tensors, (SHARD,), notes)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Writes down the tensors of one model. `kind` and `block` are the source format's."""

    facts: ModelFacts
    text: Mapping[str, Any]
    vision: Mapping[str, Any] | None
    kind: str
    block: tuple[int, int] | None
    group_size: int | None
    mtp_has_embeddings: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], facts: ModelFacts, mtp_has_embeddings: bool) -> "_Maker":
        source = detect_format(config, CheckpointIndex(Path("known"), {}, ()))
        vision = config.get("vision_config")
        return cls(facts, facts.text_config, vision, source.kind, source.block, source.group_size, mtp_has_embeddings)

    def tensors(self) -> Iterator[Spec]:
        facts, hidden, vocab = self.facts, self.facts.hidden_size, int(self.text["vocab_size"])
        top = facts.arch.prefix
        yield f"{top}model.embed_tokens.weight", "BF16", (vocab, hidden)
        yield f"{top}model.norm.weight", "BF16", (hidden,)
        yield f"{top}lm_head.weight", "BF16", (vocab, hidden)
        for layer in range(facts.num_layers + facts.num_mtp_layers):
            at = facts.layer_prefix(layer)
            yield f"{at}input_layernorm.weight", "BF16", (hidden,)
            yield f"{at}post_attention_layernorm.weight", "BF16", (hidden,)
            yield from self._attention(f"{at}self_attn.", layer)
            yield from self._mlp(f"{at}mlp.", layer)
            if layer in facts.mtp_layers:
                yield from self._mtp(at, vocab)
        if self.vision is not None:
            yield from _vision(self.vision)

    def _linear(self, module: str, rows: int, columns: int) -> Iterator[Spec]:
        """A linear module that the FP8 releases quantize; what INT4 and BF16 releases leave alone."""
        if self.kind == "fp8-block":
            assert self.block is not None
            yield f"{module}.weight", "F8_E4M3", (rows, columns)
            yield f"{module}.weight_scale_inv", "F32", (-(-rows // self.block[0]), -(-columns // self.block[1]))
        elif self.kind == "fp8-channel":
            yield f"{module}.weight", "F8_E4M3", (rows, columns)
            yield f"{module}.weight_scale", "BF16", (rows, 1)
        else:
            yield f"{module}.weight", "BF16", (rows, columns)

    def _expert(self, module: str, rows: int, columns: int) -> Iterator[Spec]:
        if self.kind != "int4-packed":
            yield from self._linear(module, rows, columns)
            return
        assert self.group_size is not None
        yield f"{module}.weight_packed", "I32", (rows, columns // CODES_PER_WORD)
        yield f"{module}.weight_scale", "BF16", (rows, columns // self.group_size)
        yield f"{module}.weight_shape", "I32", (2,)

    def _attention(self, at: str, layer: int) -> Iterator[Spec]:
        if self.facts.arch.attention == "gqa":
            yield from self._gqa(at)
            return
        text, hidden, heads = self.text, self.facts.hidden_size, int(self.text["num_attention_heads"])
        query, latent, rope = int(text["q_lora_rank"]), int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
        nope, value = int(text["qk_nope_head_dim"]), int(text["v_head_dim"])
        yield from self._linear(f"{at}q_a_proj", query, hidden)
        yield f"{at}q_a_layernorm.weight", "BF16", (query,)
        yield from self._linear(f"{at}q_b_proj", heads * (nope + rope), query)
        yield from self._linear(f"{at}kv_a_proj_with_mqa", latent + rope, hidden)
        yield f"{at}kv_a_layernorm.weight", "BF16", (latent,)
        yield from self._linear(f"{at}kv_b_proj", heads * (nope + value), latent)
        yield from self._linear(f"{at}o_proj", hidden, heads * value)
        if self.facts.arch.attention == "dsa" and self._has_indexer(layer):
            width, index_heads = int(text["index_head_dim"]), int(text["index_n_heads"])
            yield from self._linear(f"{at}indexer.wq_b", index_heads * width, query)
            yield from self._linear(f"{at}indexer.wk", width, hidden)
            yield f"{at}indexer.weights_proj.weight", "BF16", (index_heads, hidden)
            yield f"{at}indexer.k_norm.weight", "BF16", (width,)
            yield f"{at}indexer.k_norm.bias", "BF16", (width,)

    def _has_indexer(self, layer: int) -> bool:
        """Layers that share another's indexer have none; an MTP layer has its own."""
        types = self.text.get("indexer_types")
        return types is None or layer >= len(types) or types[layer] == "full"

    def _gqa(self, at: str) -> Iterator[Spec]:
        text, hidden, width = self.text, self.facts.hidden_size, int(self.text["head_dim"])
        sizes = {"q_proj": int(text["num_attention_heads"]) * width, "k_proj": int(text["num_key_value_heads"]) * width}
        sizes["v_proj"] = sizes["k_proj"]
        for name, rows in sizes.items():
            yield from self._linear(at + name, rows, hidden)
            if text.get("attention_bias"):
                yield f"{at}{name}.bias", "BF16", (rows,)
        yield from self._linear(f"{at}o_proj", hidden, sizes["q_proj"])
        if text.get("use_qk_norm"):
            yield f"{at}q_norm.weight", "BF16", (width,)
            yield f"{at}k_norm.weight", "BF16", (width,)

    def _mlp(self, at: str, layer: int) -> Iterator[Spec]:
        facts, hidden = self.facts, self.facts.hidden_size
        if layer not in facts.moe_layers:
            yield from self._gated(at, int(self.text["intermediate_size"]))
            return
        yield f"{at}gate.weight", "BF16", (facts.num_experts, hidden)
        yield f"{at}gate.e_score_correction_bias", "F32", (facts.num_experts,)
        yield from self._gated(f"{at}shared_experts.", int(self.text["n_shared_experts"]) * facts.moe_intermediate_size)
        for expert in range(facts.num_experts):
            for projection in PROJECTIONS:
                yield from self._expert(f"{at}experts.{expert}.{projection}", *facts.expert_shape(projection))

    def _gated(self, at: str, width: int) -> Iterator[Spec]:
        yield from self._linear(f"{at}gate_proj", width, self.facts.hidden_size)
        yield from self._linear(f"{at}up_proj", width, self.facts.hidden_size)
        yield from self._linear(f"{at}down_proj", self.facts.hidden_size, width)

    def _mtp(self, at: str, vocab: int) -> Iterator[Spec]:
        hidden = self.facts.hidden_size
        for norm in MTP_NORMS:
            yield f"{at}{norm}.weight", "BF16", (hidden,)
        yield f"{at}eh_proj.weight", "BF16", (hidden, 2 * hidden)
        if self.mtp_has_embeddings:
            yield f"{at}embed_tokens.weight", "BF16", (vocab, hidden)
            yield f"{at}shared_head.head.weight", "BF16", (vocab, hidden)


def _vision(vision: Mapping[str, Any]) -> Iterator[Spec]:
    """Kimi K2.5's tower and projector, BF16 throughout."""
    width, inner, patch = (int(vision[key]) for key in ("vt_hidden_size", "vt_intermediate_size", "patch_size"))
    yield "vision_tower.patch_embed.proj.weight", "BF16", (width, 3, patch, patch)
    yield "vision_tower.patch_embed.proj.bias", "BF16", (width,)
    size = (int(vision["init_pos_emb_height"]), int(vision["init_pos_emb_width"]))
    yield "vision_tower.patch_embed.pos_emb.weight", "BF16", (*size, width)
    layers: dict[str, tuple[int, ...]] = {
        "norm0": (width,), "norm1": (width,), "wqkv": (3 * width, width), "wo": (width, width),
        "mlp.fc0": (inner, width), "mlp.fc1": (width, inner),
    }  # fmt: skip
    for block in range(int(vision["vt_num_hidden_layers"])):
        yield from _affine(f"vision_tower.encoder.blocks.{block}.", layers)
    yield from _affine("vision_tower.encoder.", {"final_layernorm": (width,)})
    merged = width * int(vision["merge_kernel_size"][0]) * int(vision["merge_kernel_size"][1])
    projector = {"pre_norm": (width,), "proj.0": (merged, merged), "proj.2": (int(vision["text_hidden_size"]), merged)}
    yield from _affine("mm_projector.", projector)


def _affine(at: str, modules: Mapping[str, tuple[int, ...]]) -> Iterator[Spec]:
    for name, shape in modules.items():
        yield f"{at}{name}.weight", "BF16", shape
        yield f"{at}{name}.bias", "BF16", shape[:1]

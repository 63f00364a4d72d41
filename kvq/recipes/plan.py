"""QuantPlan: what will be done to every tensor, decided from the config and the headers before any weight is read."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple

from kvq.checkpoint.architecture import EXPERTS, PROJECTIONS, ModelFacts, model_facts
from kvq.checkpoint.formats import SourceFormat, detect_format
from kvq.checkpoint.header import TensorInfo, tensor_bytes
from kvq.checkpoint.index import CheckpointIndex
from kvq.checkpoint.patterns import REGEX, matching
from kvq.errors import CheckpointError, RecipeError
from kvq.recipes.schema import Recipe
from kvq.recipes.scheme import quantization_config
from kvq.shares import check_enough, share

Action = Literal["pack", "keep", "dequantize"]

# Tensor classes by the name below the layer (or below the prefix); the first match counts.
CLASS_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"mlp\.experts\.\d+\.", "routed experts"),
    (r"mlp\.shared_experts\.", "shared experts"),
    (r"mlp\.gate\.", "router"),
    (r"mlp\.(gate|up|down)_proj\.", "dense MLP"),
    (r"self_attn\.indexer\.", "indexer"),
    (r"self_attn\.\w+_proj(_with_mqa)?\.", "attention"),
    (r"(.*norm|self_attn\..*norm)\.", "norms"),
    (r"(eh_proj|shared_head\.head|embed_tokens)\.", "MTP"),
)
REASONS = {
    "routed experts": "most of the bytes; read by few tokens each",
    "shared experts": "read by every token; SGLang cannot load them in INT4",
    "router": "decides the routing; kept exact",
    "dense MLP": "read by every token",
    "indexer": "engines expect it so",
    "attention": "read by every token; engines expect FP8 or BF16",
    "norms": "small",
    "embeddings": "engines expect BF16",
    "lm_head": "engines expect BF16",
    "MTP": "draft layer's own tensors; kept",
    "vision": "not part of the language model",
    "other": "kept",
}


class TensorPlan(NamedTuple):
    """One tensor of the output. `sources` are the tensors it is made of. A tuple, as there are 180,000 of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    action: Action
    tensor_class: str
    shard: str
    sources: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class QuantPlan:
    """The output, tensor by tensor. `pass_through` means: nothing is quantized, files are copied as they are."""

    recipe: Recipe
    facts: ModelFacts
    source: SourceFormat
    tensors: Mapping[str, TensorPlan]
    quantization_config: Mapping[str, Any] | None
    source_bytes: int
    warnings: tuple[str, ...]
    pass_through: bool = False
    num_ranks: int = 1

    @property
    def output_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def num_modules(self) -> int:
        """Expert matrices that will be quantized."""
        return sum(
            tensor.name.endswith(".weight_packed") for tensor in self.tensors.values() if tensor.action == "pack"
        )

    def layer_shards(self, rank: int) -> dict[int | None, tuple[str, list[TensorPlan]]]:
        """What a rank writes for each layer, None being what lies outside; ("", []) where it writes nothing."""
        shards, names = self.shard_tensors(), _shard_names(self.facts, self.num_ranks)
        layers = [None, *range(self.facts.num_layers + self.facts.num_mtp_layers)]
        own = {layer: names.get((layer, rank), "") for layer in layers}
        return {layer: (shard, shards.get(shard, [])) for layer, shard in own.items()}

    def rank_rows(self) -> list[dict[str, Any]]:
        """What each of several ranks has of every layer's experts and of the sequences asked for, and writes."""
        if self.num_ranks == 1:
            return []
        names, tensors = _shard_names(self.facts, self.num_ranks), self.shard_tensors()
        rows = []
        for rank in range(self.num_ranks):
            experts = share(self.facts.num_experts, rank, self.num_ranks)
            shards = [name for (_, owner), name in names.items() if owner == rank]
            rows.append(
                {
                    "rank": rank,
                    "first_expert": experts.start,
                    "num_experts": len(experts),
                    "num_sequences": len(share(self.recipe.num_calibration_samples, rank, self.num_ranks)),
                    "shards": len(shards),
                    "tensor_bytes": sum(tensor.nbytes for name in shards for tensor in tensors.get(name, [])),
                }
            )
        return rows

    def shard_tensors(self) -> dict[str, list[TensorPlan]]:
        """Shard -> its tensors, in name order."""
        shards: dict[str, list[TensorPlan]] = {}
        for tensor in self.tensors.values():
            shards.setdefault(tensor.shard, []).append(tensor)
        return dict(sorted(shards.items()))


def resolve_plan(recipe: Recipe, config: Mapping[str, Any], index: CheckpointIndex, num_ranks: int = 1) -> QuantPlan:
    """Raises CheckpointError for a source that is unsupported or lacks tensors, RecipeError for a group size that does
    not fit."""
    facts = model_facts(config, index.folder)
    source = detect_format(config, index)
    dead = dead_entries(source.ignore, index.tensors)
    warnings = [
        *index.warnings,
        *(f"the source's config ignores {entry!r}, but no module has that name" for entry in dead),
    ]
    if source.kind == "int4-packed":
        return _pass_through(recipe, facts, source, index, warnings)
    _check_experts(facts, index)
    _check_group_size(recipe, facts)
    check_enough(facts.num_experts, num_ranks)
    tensors = {plan.name: plan for plan in _plan_tensors(recipe, facts, source, index, num_ranks)}
    unquantized = [name.removesuffix(".weight") for name, plan in tensors.items() if _is_plain_linear(plan)]
    described = quantization_config(recipe, source, unquantized)
    return QuantPlan(recipe, facts, source, tensors, described, index.total_bytes, tuple(warnings), num_ranks=num_ranks)


def _is_plain_linear(plan: TensorPlan) -> bool:
    """A BF16 matrix of a linear module (and not an embedding or a norm)."""
    return (
        len(plan.shape) == 2
        and plan.name.endswith(".weight")
        and not plan.name.endswith("embed_tokens.weight")
        and plan.dtype in ("BF16", "F16", "F32")
        and plan.tensor_class not in ("embeddings", "vision")
    )


def _pass_through(
    recipe: Recipe, facts: ModelFacts, source: SourceFormat, index: CheckpointIndex, warnings: list[str]
) -> QuantPlan:
    """Models trained in INT4 lose if they are rounded a second time: every byte is kept."""
    for layer in facts.moe_layers:
        for module in (facts.expert_module(layer, e, p) for e in range(facts.num_experts) for p in PROJECTIONS):
            _ = index[f"{module}.weight_packed"], index[f"{module}.weight_scale"]
    tensors = {
        name: TensorPlan(name, info.dtype, info.shape, "keep", tensor_class(name, facts), info.shard, (name,))
        for name, info in index.tensors.items()
    }
    warnings = [*warnings, f"the source is {source.title} already: all tensors pass through byte for byte"]
    return QuantPlan(recipe, facts, source, tensors, None, index.total_bytes, tuple(warnings), pass_through=True)


def tensor_class(name: str, facts: ModelFacts) -> str:
    """Which kind of tensor this is; a key of REASONS."""
    if not name.startswith(facts.arch.prefix) or name.startswith(("vision_tower.", "mm_projector.")):
        return "vision"
    _, layer, below = next(facts.places((name,)))
    if layer is None:
        tops = {"model.embed_tokens.": "embeddings", "lm_head.": "lm_head", "model.norm.": "norms"}
        return next((value for start, value in tops.items() if below.startswith(start)), "other")
    return class_in_layer(below)


@cache
def class_in_layer(below: str) -> str:
    """Tensor class by a name below its layer."""
    return next((title for pattern, title in CLASS_PATTERNS if re.match(pattern, below)), "other")


def _plan_tensors(
    recipe: Recipe, facts: ModelFacts, source: SourceFormat, index: CheckpointIndex, num_ranks: int
) -> Iterator[TensorPlan]:
    shard_of = _shard_names(facts, num_ranks)
    owner = [rank for rank in range(num_ranks) for _ in share(facts.num_experts, rank, num_ranks)]
    scale_end = f".{source.scale_suffix}" if source.scale_suffix else None
    for name, layer, below in facts.places(sorted(index.tensors)):
        info, shard = index.tensors[name], shard_of[layer, 0]
        kind = tensor_class(name, facts) if layer is None else class_in_layer(below)
        if kind == "routed experts" and name.endswith(".weight"):
            sources, module = _sources(info, source), name[: -len("weight")]
            if num_ranks > 1:
                shard = shard_of[layer, owner[int(name.split(f".{EXPERTS}", 1)[1].split(".", 1)[0])]]
            for suffix, dtype, shape in _packed_parts(info.shape, recipe.num_bits, recipe.group_size):
                yield TensorPlan(module + suffix, dtype, shape, "pack", kind, shard, sources)
        elif kind == "routed experts" and scale_end and name.endswith(scale_end):
            _check_scaled(name, source, index)  # consumed with its weight
        elif kind == "routed experts":
            raise CheckpointError(f"{index.folder}: unexpected tensor {name}: kvq knows weights and scales of experts.")
        else:
            yield from _rest(
                recipe, source, index, info, TensorPlan(name, info.dtype, info.shape, "keep", kind, shard, (name,))
            )


def _sources(info: TensorInfo, source: SourceFormat) -> tuple[str, ...]:
    if info.dtype != "F8_E4M3":
        return (info.name,)
    return (info.name, f"{info.name.removesuffix('weight')}{source.scale_suffix}")


@cache
def _packed_parts(
    shape: tuple[int, int], num_bits: int, group_size: int
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """What a packed matrix is stored as: suffix, dtype and shape of each part."""
    rows, columns = shape
    return (
        ("weight_packed", "I32", (rows, columns * num_bits // 32)),
        ("weight_scale", "BF16", (rows, columns // group_size)),
        ("weight_shape", "I64", (2,)),
    )


def _rest(
    recipe: Recipe, source: SourceFormat, index: CheckpointIndex, info: TensorInfo, keep: TensorPlan
) -> Iterator[TensorPlan]:
    """Everything that is not a routed expert."""
    name, kind = keep.name, keep.tensor_class
    to_bf16 = recipe.rest == "bf16" or name.endswith(
        (".indexer.wk.weight", ".indexer.wk.weight_scale_inv", ".indexer.wk.weight_scale")
    )
    if info.dtype == "F8_E4M3":
        if to_bf16:
            yield TensorPlan(name, "BF16", info.shape, "dequantize", kind, keep.shard, _sources(info, source))
        else:
            yield keep
    elif source.scale_suffix and name.endswith("." + source.scale_suffix):
        _check_scaled(name, source, index)
        if not to_bf16:
            # compressed-tensors calls the same multiplier weight_scale; the bytes stay
            new_name = f"{name.removesuffix(source.scale_suffix)}weight_scale"
            yield TensorPlan(new_name, info.dtype, info.shape, "keep", kind, keep.shard, (name,))
    else:
        yield keep


def _check_scaled(scale_name: str, source: SourceFormat, index: CheckpointIndex) -> None:
    if index[f"{scale_name.removesuffix(source.scale_suffix or '')}weight"].dtype != "F8_E4M3":
        raise CheckpointError(f"{index.folder}: {scale_name} is a scale, but its weight is not FP8.")


def _shard_names(facts: ModelFacts, num_ranks: int) -> dict[tuple[int | None, int], str]:
    """One shard for what lies outside the layers, then one per layer (an MTP layer too) and, where there are experts,
    one per rank; keys are layer and rank."""
    keys: list[tuple[int | None, int]] = [(None, 0)]
    for layer in range(facts.num_layers + facts.num_mtp_layers):  # as _check_layers has seen
        keys += [(layer, rank) for rank in range(num_ranks if layer in facts.moe_layers else 1)]
    return {key: f"model-{number:05d}-of-{len(keys):05d}.safetensors" for number, key in enumerate(keys, start=1)}


def _check_experts(facts: ModelFacts, index: CheckpointIndex) -> None:
    """Every routed expert of every MoE layer must be there with the shape that the config says, and no other."""
    modules = set()
    shapes = {projection: facts.expert_shape(projection) for projection in PROJECTIONS}
    for layer, expert in product(facts.moe_layers, range(facts.num_experts)):
        start = facts.expert_module(layer, expert, "")
        for projection, shape in shapes.items():
            modules.add(start + projection)
            info = index[start + projection + ".weight"]
            if info.shape != shape:
                raise CheckpointError(
                    f"{index.folder / info.shard}: {info.name} is {list(info.shape)}, the config says {list(shape)}."
                )
    _check_layers(facts, index)
    for name in index.tensors:
        module = name.rsplit(".", 1)[0]
        if ".mlp.experts." in name and module not in modules and tensor_class(name, facts) == "routed experts":
            raise CheckpointError(
                f"{index.folder}: there is a tensor {name}, but config.json says {facts.num_experts} experts in each "
                f"layer from {facts.first_moe_layer} on. Is config.json from another release?"
            )


def _check_layers(facts: ModelFacts, index: CheckpointIndex) -> None:
    """There must be tensors of every layer that the config counts, and of the ends of the model, and of no other."""
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        index[facts.arch.prefix + name]  # raises when absent
    layers = {layer for _, layer, _ in facts.places(index.tensors) if layer is not None}
    expected = set(range(facts.num_layers + facts.num_mtp_layers))
    unknown, absent = sorted(layers - expected), sorted(expected - layers)
    if absent:
        raise CheckpointError(f"{index.folder}: there is no tensor of layer {absent[0]}. Download the folder again.")
    if unknown:
        raise CheckpointError(
            f"{index.folder}: there are tensors of layer {unknown[0]}, but config.json counts {facts.num_layers} "
            f"layers and {facts.num_mtp_layers} MTP layers (num_nextn_predict_layers). Is config.json from another "
            "release?"
        )


def _check_group_size(recipe: Recipe, facts: ModelFacts) -> None:
    fits = [size for size in (32, 64, 128) if facts.moe_intermediate_size % size == 0 and facts.hidden_size % size == 0]
    if recipe.group_size not in fits:
        remedy = f"use --set group_size={fits[-1]}" if fits else "no group size that kvq writes fits"
        raise RecipeError(
            f"group_size {recipe.group_size} does not divide the experts' columns (hidden_size {facts.hidden_size}, "
            f"moe_intermediate_size {facts.moe_intermediate_size}); sizes that fit: {fits or 'none'}; {remedy}."
        )


def dead_entries(ignore: Iterable[str], names: Iterable[str]) -> list[str]:
    """Entries of an ignore list that name no module, part or tail of one. GLM-5.2 ships one; harmless, but say so."""
    entries = list(ignore)
    if not entries:
        return []
    modules = {name.rsplit(".", 1)[0] for name in names}
    dotted = "\n".join(f".{module}." for module in modules)
    meant = matching([entry for entry in entries if entry.startswith(REGEX)], modules)
    return [entry for entry in entries if not (meant[entry] if entry in meant else f".{entry}." in dotted)]

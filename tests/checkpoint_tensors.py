"""Names, shapes and values of the tensors in the tiny checkpoints; tests/checkpoints.py writes them to disk."""

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, Tensor]
Json = dict[str, Any]

GLM = ("glm_moe_dsa", "glm4_moe")
KIMI = ("kimi_k2", "kimi_k25")
FAMILIES = (*GLM, "deepseek_v3", *KIMI)
SOURCES = ("fp8_block", "fp8_channel", "int4", "bf16")
INT4_GROUP = 32
VT_HIDDEN, VT_INTER = 32, 56
# Not the router, eh_proj or indexer.weights_proj: the published FP8 files keep these in BF16.
FP8_LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
FP8_LINEARS |= {"wq_b", "wk", "gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True)
class Tiny:
    """Dimensions under the names that config.json uses. A family ignores those that it has no use for."""

    vocab_size: int = 128
    hidden_size: int = 64
    intermediate_size: int = 128
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 3
    first_k_dense_replace: int = 1
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    q_lora_rank: int = 32
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 16
    index_head_dim: int = 16
    index_n_heads: int = 2
    index_topk: int = 16
    num_nextn_predict_layers: int = 1


class Options(TypedDict, total=False):
    block_size: tuple[int, int]  # fp8_block only
    single_file: bool
    pairs_together: bool  # no scale in another shard than its weight
    starved_expert: bool  # the router hardly ever picks the expert that starved_expert() names


TINY = Tiny()
PRESETS = {
    "glm-4.5-air": replace(TINY, moe_intermediate_size=88),  # 8 * 11, as 1408 is 128 * 11: no group of 16 or more fits
    "glm-4.7": replace(TINY, moe_intermediate_size=96),  # 32 divides it and 64 does not, as for 1536 / 8 = 192 and 128
    "glm-5.2": replace(TINY, num_hidden_layers=4),  # indexers: full, full, shared, full
    "deepseek-v3": replace(TINY, n_group=4, topk_group=2),
    "kimi-k2": TINY,
}


def preset(name: str) -> Tiny:
    return PRESETS[name]


def starved_expert(seed: int, dims: Tiny = TINY) -> int:
    """The expert that option `starved_expert` hides, the same one in every layer."""
    return seed % dims.n_routed_experts


def indexer_types(dims: Tiny) -> list[str]:
    """What index_topk_freq 2 and index_skip_topk_offset 2 mean."""
    return ["shared" if i >= 2 and i % 2 == 0 else "full" for i in range(dims.num_hidden_layers)]


def mtp_layers(family: str, dims: Tiny = TINY) -> list[int]:
    first = dims.num_hidden_layers
    return list(range(first, first + dims.num_nextn_predict_layers)) if family in GLM else []


# Names and shapes.


def _named(prefix: str, shapes: Shapes, suffix: str = ".weight") -> Shapes:
    return {prefix + name + suffix: shape for name, shape in shapes.items()}


def _gqa(dims: Tiny) -> Shapes:
    query, key = dims.num_attention_heads * dims.head_dim, dims.num_key_value_heads * dims.head_dim
    rows = {"q_proj": query, "k_proj": key, "v_proj": key}
    weights: Shapes = {name: (count, dims.hidden_size) for name, count in rows.items()}
    weights |= {"o_proj": (dims.hidden_size, query), "q_norm": (dims.head_dim,), "k_norm": (dims.head_dim,)}
    return _named("self_attn.", weights) | {f"self_attn.{name}.bias": (count,) for name, count in rows.items()}


def _mla(dims: Tiny) -> Shapes:
    heads, nope, rope, value = dims.num_attention_heads, dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim
    weights: Shapes = {"q_a_proj": (dims.q_lora_rank, dims.hidden_size), "q_a_layernorm": (dims.q_lora_rank,)}
    weights |= {"q_b_proj": (heads * (nope + rope), dims.q_lora_rank)}
    weights |= {"kv_a_proj_with_mqa": (dims.kv_lora_rank + rope, dims.hidden_size)}
    weights |= {"kv_a_layernorm": (dims.kv_lora_rank,), "kv_b_proj": (heads * (nope + value), dims.kv_lora_rank)}
    return _named("self_attn.", weights | {"o_proj": (dims.hidden_size, heads * value)})


def _indexer(dims: Tiny) -> Shapes:
    size, heads = dims.index_head_dim, dims.index_n_heads
    weights: Shapes = {"wq_b": (heads * size, dims.q_lora_rank), "wk": (size, dims.hidden_size), "k_norm": (size,)}
    weights |= {"weights_proj": (heads, dims.hidden_size)}
    return _named("self_attn.indexer.", weights) | {"self_attn.indexer.k_norm.bias": (size,)}


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return _named(prefix, {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)})


def _moe(dims: Tiny) -> Shapes:
    experts, hidden, inner = dims.n_routed_experts, dims.hidden_size, dims.moe_intermediate_size
    shapes: Shapes = {"mlp.gate.weight": (experts, hidden), "mlp.gate.e_score_correction_bias": (experts,)}
    for expert in range(experts):
        shapes |= _mlp(f"mlp.experts.{expert}.", hidden, inner)
    return shapes | _mlp("mlp.shared_experts.", hidden, inner * dims.n_shared_experts)


def _mtp_extra(family: str, dims: Tiny) -> Shapes:
    hidden, embedding = dims.hidden_size, (dims.vocab_size, dims.hidden_size)
    weights: Shapes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    own: Shapes = {"embed_tokens": embedding, "shared_head.head": embedding} if family == "glm4_moe" else {}
    return _named("", weights | {"shared_head.norm": (hidden,)} | own)


def _layer(family: str, dims: Tiny, index: int) -> Shapes:
    hidden, is_mtp = dims.hidden_size, index >= dims.num_hidden_layers
    shapes = _named("", {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)})
    shapes |= _gqa(dims) if family == "glm4_moe" else _mla(dims)
    if family == "glm_moe_dsa" and (is_mtp or indexer_types(dims)[index] == "full"):
        shapes |= _indexer(dims)
    is_dense = index < dims.first_k_dense_replace
    shapes |= _mlp("mlp.", hidden, dims.intermediate_size) if is_dense else _moe(dims)
    return _named(f"model.layers.{index}.", shapes | (_mtp_extra(family, dims) if is_mtp else {}), suffix="")


def language_model(family: str, dims: Tiny) -> Shapes:
    embedding = (dims.vocab_size, dims.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": embedding}
    for index in [*range(dims.num_hidden_layers), *mtp_layers(family, dims)]:
        shapes |= _layer(family, dims, index)
    return shapes | {"model.norm.weight": (dims.hidden_size,), "lm_head.weight": embedding}


def _vision_tower(dims: Tiny) -> Shapes:
    hidden, inner, merged, block = VT_HIDDEN, VT_INTER, 4 * VT_HIDDEN, "vision_tower.encoder.blocks.0."
    modules: Shapes = {"vision_tower.patch_embed.proj": (hidden, 3, 14, 14)}
    modules |= {f"{block}norm0": (hidden,), f"{block}wqkv": (3 * hidden, hidden), f"{block}wo": (hidden, hidden)}
    modules |= {f"{block}norm1": (hidden,), f"{block}mlp.fc0": (inner, hidden), f"{block}mlp.fc1": (hidden, inner)}
    modules |= {"vision_tower.encoder.final_layernorm": (hidden,), "mm_projector.pre_norm": (hidden,)}
    modules |= {"mm_projector.proj.0": (merged, merged), "mm_projector.proj.2": (dims.hidden_size, merged)}
    biases: Shapes = {name: shape[:1] for name, shape in modules.items()}
    grid: Shapes = {"vision_tower.patch_embed.pos_emb.weight": (8, 8, hidden)}
    return grid | _named("", modules) | _named("", biases, suffix=".bias")


# Values.


def _random(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.1 * noise  # F32, as published: BF16 is too coarse for it
    if name.endswith("bias"):
        return (0.05 * noise).bfloat16()
    if len(shape) == 1:
        return (1 + 0.1 * noise).bfloat16()
    if name.endswith("embed_tokens.weight"):
        return (0.5 * noise).bfloat16()
    if name.endswith("mlp.gate.weight"):
        # Rows of unequal length: the long ones win far more often, so experts see very different token counts.
        lengths = torch.linspace(0.1, 0.6, shape[0])[torch.randperm(shape[0], generator=generator)]
        return (lengths[:, None] * noise).bfloat16()
    return (max(0.05, 0.7 / math.sqrt(shape[-1])) * noise).bfloat16()


def plain_tensors(family: str, dims: Tiny, seed: int, starve: bool) -> Tensors:
    tensors = {name: _random(name, shape, seed) for name, shape in language_model(family, dims).items()}
    for name, tensor in tensors.items():
        if starve and name.endswith("e_score_correction_bias"):
            # Scores are sigmoids, so this expert wins only where hardly any other one scores at all.
            tensor[starved_expert(seed, dims)] = -0.5
    if family != "kimi_k25":
        return tensors
    vision = {name: _random(name, shape, seed) for name, shape in _vision_tower(dims).items()}
    return vision | {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def _to_fp8(scaled: Tensor) -> Tensor:
    # Scales in BF16 may round down, and a cast alone would turn what then exceeds the largest value into NaN.
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)


def _fp8_block(name: str, weight: Tensor, block_size: tuple[int, int]) -> Tensors:
    (rows, columns), (height, width) = weight.shape, block_size
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / 448
    codes = _to_fp8(blocks / scale[:, None, :, None]).view(padded.shape)
    return {name: codes[:rows, :columns].contiguous(), f"{name}_scale_inv": scale}


def _fp8_channel(name: str, weight: Tensor) -> Tensors:
    scale = (weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 448).bfloat16()
    return {name: _to_fp8(weight.float() / scale.float()), f"{name}_scale": scale}


def _int4(name: str, weight: Tensor, shape_dtype: torch.dtype) -> Tensors:
    # Only this source needs the package, and it is slow to import.
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    rows, columns = weight.shape
    if columns % INT4_GROUP:
        raise ValueError(f"{name} has {columns} columns; INT4 sources need a multiple of {INT4_GROUP}")
    groups = weight.float().view(rows, -1, INT4_GROUP)
    scale = (groups.abs().amax(dim=2).clamp_min(1e-12) / 7.5).bfloat16()
    codes = (groups / scale.float()[:, :, None]).round().clamp(-8, 7).view(rows, columns).to(torch.int8)
    shape = torch.tensor([rows, columns], dtype=shape_dtype)
    return {f"{name}_packed": pack_to_int32(codes, 4).contiguous(), f"{name}_scale": scale, f"{name}_shape": shape}


def stored(name: str, tensor: Tensor, family: str, source: str, block_size: tuple[int, int]) -> Tensors:
    """What the source holds for one BF16 tensor, weight first."""
    if source == "int4" and ".mlp.experts." in name:
        return _int4(name, tensor, torch.int32 if family in KIMI else torch.int64)
    if name.endswith(".weight") and name.split(".")[-2] in FP8_LINEARS:
        if source == "fp8_block":
            return _fp8_block(name, tensor, block_size)
        if source == "fp8_channel":
            return _fp8_channel(name, tensor)
    return {name: tensor}

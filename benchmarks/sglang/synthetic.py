"""A model of real layer dimensions from random weights, in FP8 blocks or as kvq writes it in INT4. For speed only.

    python benchmarks/sglang/synthetic.py FOLDER fp8|int4 [--shape glm-5.2] [--tp-slice 8] [--layers 16]

With --tp-slice 8 the experts' width, the heads and the dense width are an eighth: what one GPU of eight computes.
Both formats come from the same values (same seed); the INT4 experts are rounded to nearest in groups of 128. The
attention is MLA without the sparse indexer (`deepseek_v3`), in FP8 either way. Made on the GPU where there is one; 16
layers of GLM-5.2's slice are 21 GB in FP8.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

BLOCK, GROUP = 128, 128
FP8_MAX = 448.0
EXPERTS_PER_FILE = 64
SHAPES = {
    "glm-5.2": {
        "hidden_size": 6144, "n_routed_experts": 256, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "intermediate_size": 12288,
    },
    "kimi-k2": {
        "hidden_size": 7168, "n_routed_experts": 384, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "intermediate_size": 18432,
    },
    "test": {
        "hidden_size": 256, "n_routed_experts": 4, "q_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 1024,
    },
}  # fmt: skip
HEADS, WIDTH = 64, 2048
# Shape suffixes: O = rows, I = columns, G = groups of a row.


def model_config(shape: str, tp_slice: int, layers: int, int4: bool) -> dict[str, Any]:
    """config.json: one dense layer and `layers` of experts."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        **SHAPES[shape], "moe_intermediate_size": WIDTH // tp_slice, "num_attention_heads": HEADS // tp_slice,
        "num_key_value_heads": HEADS // tp_slice, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 2 if shape == "test" else 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "num_hidden_layers": layers + 1, "moe_layer_freq": 1, "vocab_size": 16384, "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "hidden_act": "silu", "attention_bias": False, "max_position_embeddings": 8192, "rope_theta": 1e6,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config["intermediate_size"] //= tp_slice
    config["quantization_config"] = _int4_config() if int4 else {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    return config


def _int4_config() -> dict[str, Any]:
    """As kvq writes it: tests/test_benchmark_model.py compares the two."""
    from kvq.checkpoint.formats import SourceFormat
    from kvq.recipes.schema import load_recipe
    from kvq.recipes.scheme import quantization_config

    source = SourceFormat("fp8-block", "FP8", "weight_scale_inv", (BLOCK, BLOCK))
    return quantization_config(load_recipe("int4-rtn"), source, ["lm_head", "model.layers.1.mlp.gate"])


def fp8_tensors(name: str, w_OI: Tensor, scale_name: str) -> Iterator[tuple[str, Tensor]]:
    """FP8 with a float32 scale for each block of 128 x 128; the last blocks may be partial."""
    rows, columns = w_OI.shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    padded = torch.zeros(blocks[0] * BLOCK, blocks[1] * BLOCK, device=w_OI.device)
    padded[:rows, :columns] = w_OI
    tiles = padded.view(blocks[0], BLOCK, blocks[1], BLOCK)
    scale = tiles.abs().amax(dim=(1, 3)).clamp_min(1e-6) / FP8_MAX
    stored = (tiles / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    yield f"{name}.weight", stored
    yield f"{name}.{scale_name}", scale


def int4_tensors(name: str, w_OI: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Round to nearest in groups; eight codes a word, plus 8, the lowest column in the lowest bits."""
    rows, columns = w_OI.shape
    grouped = w_OI.view(rows, columns // GROUP, GROUP)
    scale_OG = (grouped.abs().amax(-1).clamp_min(1e-6) / 7.5).to(torch.bfloat16)
    codes = (grouped / scale_OG.float()[..., None]).round().clamp_(-8, 7).view(rows, columns // 8, 8).to(
        torch.int32
    ) + 8
    packed = torch.zeros(rows, columns // 8, dtype=torch.int32, device=w_OI.device)
    for place in range(8):
        packed |= codes[..., place] << (4 * place)
    yield f"{name}.weight_packed", packed
    yield f"{name}.weight_scale", scale_OG
    yield f"{name}.weight_shape", torch.tensor([rows, columns])


def layer_linears(config: dict[str, Any], layer: int) -> dict[str, tuple[int, int]]:
    """FP8 matrices of a layer that are no routed experts."""
    hidden, heads, latent, rope = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    )
    nope, value, q_rank = (config[key] for key in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank"))
    shapes = {
        "self_attn.q_a_proj": (q_rank, hidden), "self_attn.q_b_proj": (heads * (nope + rope), q_rank),
        "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
        "self_attn.kv_b_proj": (heads * (nope + value), latent),
        "self_attn.o_proj": (hidden, heads * value),
    }  # fmt: skip
    dense = layer == 0
    mlp, width = (
        ("mlp", config["intermediate_size"]) if dense else ("mlp.shared_experts", config["moe_intermediate_size"])
    )
    for projection in ("gate_proj", "up_proj"):
        shapes[f"{mlp}.{projection}"] = (width, hidden)
    shapes[f"{mlp}.down_proj"] = (hidden, width)
    return shapes


class Writer:
    """Shards of a folder; each is written when it is whole, so only one is held."""

    def __init__(self, folder: Path, config: dict[str, Any], int4: bool, seed: int = 0) -> None:
        self.folder, self.config, self.int4 = folder, config, int4
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.weight_map: dict[str, str] = {}
        self.total = 0

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device) * 0.02

    def save(self, shard: str, tensors: dict[str, Tensor]) -> None:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, self.folder / shard)
        self.weight_map |= dict.fromkeys(tensors, shard)
        self.total += sum(tensor.nbytes for tensor in tensors.values())

    def ends(self) -> None:
        hidden, vocabulary = self.config["hidden_size"], self.config["vocab_size"]
        tensors = {
            name: self.random(vocabulary, hidden).bfloat16() for name in ("model.embed_tokens.weight", "lm_head.weight")
        }
        self.save("model-ends.safetensors", {**tensors, "model.norm.weight": torch.ones(hidden).bfloat16()})

    def layer(self, layer: int) -> None:
        start, hidden = f"model.layers.{layer}.", self.config["hidden_size"]
        scale = "weight_scale" if self.int4 else "weight_scale_inv"
        tensors: dict[str, Tensor] = {}
        for name, shape in layer_linears(self.config, layer).items():
            tensors |= dict(fp8_tensors(start + name, self.random(*shape), scale))
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden,
                 "self_attn.q_a_layernorm": self.config["q_lora_rank"],
                 "self_attn.kv_a_layernorm": self.config["kv_lora_rank"]}  # fmt: skip
        tensors |= {f"{start}{name}.weight": torch.ones(size).bfloat16() for name, size in norms.items()}
        experts = self.config["n_routed_experts"]
        if layer:
            tensors[f"{start}mlp.gate.weight"] = self.random(experts, hidden).bfloat16()
            tensors[f"{start}mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
        self.save(f"model-{layer:03d}-rest.safetensors", tensors)
        for first in range(0, experts if layer else 0, EXPERTS_PER_FILE):
            self.save(f"model-{layer:03d}-{first:03d}.safetensors", dict(self.experts(start, first)))

    def experts(self, start: str, first: int) -> Iterator[tuple[str, Tensor]]:
        hidden, width = self.config["hidden_size"], self.config["moe_intermediate_size"]
        for expert in range(first, min(first + EXPERTS_PER_FILE, self.config["n_routed_experts"])):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                weight = self.random(*((hidden, width) if projection == "down_proj" else (width, hidden)))
                name = f"{start}mlp.experts.{expert}.{projection}"
                yield from int4_tensors(name, weight) if self.int4 else fp8_tensors(name, weight, "weight_scale_inv")

    def finish(self) -> None:
        index = {"metadata": {"total_size": self.total}, "weight_map": self.weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        (self.folder / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")


def write_model(folder: Path, kind: str, shape: str, tp_slice: int, layers: int) -> int:
    """The whole folder; gives the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = Writer(folder, model_config(shape, tp_slice, layers, kind == "int4"), kind == "int4")
    writer.ends()
    for layer in range(layers + 1):
        writer.layer(layer)
    writer.finish()
    return writer.total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=["fp8", "int4"])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="glm-5.2")
    parser.add_argument("--tp-slice", type=int, choices=[1, 2, 4, 8], default=8)
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    started = time.monotonic()
    total = write_model(arguments.folder, arguments.kind, arguments.shape, arguments.tp_slice, arguments.layers)
    sys.stdout.write(f"{arguments.folder}: {total / 1e9:.1f} GB in {time.monotonic() - started:.0f} s\n")


if __name__ == "__main__":
    main()

"""One MoE layer at real size through the whole pipeline, on synthetic FP8 weights and tokens: time and peak memory.

    python benchmarks/real_size_layer.py SCRATCH [--shape glm-5.2|kimi-k2] [--experts N] [--sequences 512] [--layers 3]
                                         [--profile]

    torchrun --nproc-per-node 2 benchmarks/real_size_layer.py SCRATCH ...        # experts and tokens shared by two GPUs

Makes a checkpoint of one dense and some equal MoE layers with the attention of that model (about 10 GB a layer for
GLM-5.2), or takes the one that an earlier run left in SCRATCH; quantizes it with the default recipe and prints when
each stage began. The first MoE layer also pays for imports, kernels that are compiled and page-locked memory; later
ones show what a layer costs in a long run. A layer is written while the next one is computed. Random weights: only time
and memory mean anything. --profile records the last layer's kernels, which slows it down a little: busy and idle time
of the GPU by stage, and the longest kernels.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_profile import GpuProfile
from safetensors.torch import save_file

from kvq.calibration.forward import pick_device
from kvq.checkpoint.source import Source
from kvq.checkpoint.writer import partial_of
from kvq.pipeline import peak_memory, prepare, quantize_checkpoint
from kvq.ranks import join
from kvq.recipes.schema import load_recipe, override

COMMON = {
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2, "num_attention_heads": 64,
    "num_key_value_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "vocab_size": 8192, "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "hidden_act": "silu", "attention_bias": False,
    "max_position_embeddings": 8192, "rope_theta": 1e6, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip
SHAPES = {
    "glm-5.2": {
        "model_type": "deepseek_v3", "hidden_size": 6144, "n_routed_experts": 256, "q_lora_rank": 2048,
        "qk_nope_head_dim": 192, "v_head_dim": 256,
    },
    "kimi-k2": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "n_routed_experts": 384, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
}  # fmt: skip


def linear_shapes(config: dict[str, int], layer: int) -> dict[str, tuple[int, int]]:
    """FP8 matrices of a layer."""
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["moe_intermediate_size"]
    nope, rope, value, latent = (
        config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    shapes = {
        "self_attn.q_a_proj": (config["q_lora_rank"], hidden),
        "self_attn.q_b_proj": (heads * (nope + rope), config["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa": (latent + rope, hidden),
        "self_attn.kv_b_proj": (heads * (nope + value), latent),
        "self_attn.o_proj": (hidden, heads * value),
    }
    dense = layer < config["first_k_dense_replace"]
    mlps = {"mlp": config["intermediate_size"]} if dense else {"mlp.shared_experts": width}
    if not dense:
        mlps |= {f"mlp.experts.{expert}": width for expert in range(config["n_routed_experts"])}
    for name, inner in mlps.items():
        shapes |= {f"{name}.{p}_proj": (inner, hidden) for p in ("gate", "up")} | {f"{name}.down_proj": (hidden, inner)}
    return shapes


def make_layer(config: dict[str, int], layer: int, device: torch.device) -> dict[str, torch.Tensor]:
    hidden = config["hidden_size"]
    prefix = f"model.layers.{layer}."
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in linear_shapes(config, layer).items():
        tensors[f"{prefix}{name}.weight"] = (
            (torch.randn(rows, columns, device=device) * 64).clamp(-448, 448).to(torch.float8_e4m3fn).cpu()
        )
        scale = torch.full((-(-rows // 128), -(-columns // 128)), 0.01 / columns**0.5)
        tensors[f"{prefix}{name}.weight_scale_inv"] = scale
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_a_layernorm": config["q_lora_rank"],
    }
    norms["self_attn.kv_a_layernorm"] = config["kv_lora_rank"]
    tensors |= {f"{prefix}{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
    if layer >= config["first_k_dense_replace"]:
        experts = config["n_routed_experts"]
        tensors[f"{prefix}mlp.gate.weight"] = (torch.randn(experts, hidden) * hidden**-0.5).bfloat16()
        tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
    return tensors


def make_source(folder: Path, config: dict[str, int], num_sequences: int, device: torch.device) -> None:
    folder.mkdir(parents=True)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    outer = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": torch.randn(vocab, hidden).bfloat16(),
    }
    weight_map = {}
    layers = config["num_hidden_layers"]
    for number, tensors in enumerate((outer, *(make_layer(config, layer, device) for layer in range(2)))):
        shard = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    for layer in range(2, layers):
        weight_map |= copy_layer(folder, f"model-00003-of-{layers + 1:05d}.safetensors", layer)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    rows = torch.randint(0, vocab, (num_sequences, 2048)).tolist()
    (folder / "tokens.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))


def copy_layer(folder: Path, shard: str, layer: int) -> dict[str, str]:
    """The shard of layer 1 once more under the names of another layer below 10, whose header has the same length."""
    assert layer < 10
    copy = shard.replace("model-00003", f"model-{layer + 2:05d}")
    with (folder / shard).open("rb") as source, (folder / copy).open("wb") as target:
        length = source.read(8)
        header = source.read(int.from_bytes(length, "little")).replace(
            b"model.layers.1.", f"model.layers.{layer}.".encode()
        )
        target.write(length + header)
        shutil.copyfileobj(source, target, 2**24)
    return dict.fromkeys((name for name in json.loads(header) if name != "__metadata__"), copy)


class Clock:
    """Prints when a kind of stage begins, and how long each layer took."""

    def __init__(self, profiled: int | None, quiet: bool) -> None:
        self.started = self.layer_began = time.monotonic()
        self.last, self.profiled, self.quiet = "", None if quiet else profiled, quiet
        self.profile: GpuProfile | None = None

    def say(self, text: str) -> None:
        if self.quiet:
            return
        sys.stdout.write(f"{time.monotonic() - self.started:8.1f} s  {text}\n")
        sys.stdout.flush()

    def stage(self, layer: int | None, num_layers: int, text: str) -> None:
        kind = text.split()[0]
        if kind == self.last:
            return
        self.last = kind
        self.say(f"layer {layer}: {text}")
        if layer is not None and layer == self.profiled:
            self.profile = self.profile or GpuProfile()
            self.profile.stage(kind)

    def layer_done(self, layer: int, num_layers: int) -> None:
        now = time.monotonic()
        self.say(f"layer {layer} done, {now - self.layer_began:.2f} s")
        self.layer_began = now
        if self.profile is not None:
            sys.stdout.write("\n".join(self.profile.stop()) + "\n")
            self.profile, self.layer_began = None, time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="glm-5.2")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3, help="MoE layers.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    config: dict[str, Any] = {**COMMON, **SHAPES[arguments.shape]}
    config["num_hidden_layers"] = 1 + arguments.layers
    config["n_routed_experts"] = arguments.experts or config["n_routed_experts"]
    ranks, device_name = join(arguments.device)
    device = pick_device(device_name)
    source, out = arguments.scratch / "source", arguments.scratch / "out"
    started = time.monotonic()
    if ranks.first:
        for left in (out, partial_of(out)):
            shutil.rmtree(left, ignore_errors=True)
        if not source.exists():
            make_source(source, config, arguments.sequences, device)
        sys.stdout.write(f"{ranks.size} ranks; source made in {time.monotonic() - started:.1f} s\n")
    ranks.gather(None)
    settings = [f"num_calibration_samples={arguments.sequences}", "max_seq_length=2048", *arguments.set]
    recipe = override(load_recipe("int4"), settings)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prepared = prepare(
        Source(source, str(source)), recipe, out, device=str(device), calibration=source / "tokens.jsonl", ranks=ranks
    )
    clock = Clock(arguments.layers if arguments.profile else None, quiet=not ranks.first)
    manifest = quantize_checkpoint(prepared, clock)
    clock.say("everything on disk")
    peak = {key: f"{(value or 0) / 2**30:.1f} GiB" for key, value in peak_memory(device).items()}
    sys.stdout.write(f"{ranks}: {peak}\n")
    if ranks.first:
        sys.stdout.write(f"{json.dumps(manifest['summary'])[:600]}\n")
    ranks.leave()


if __name__ == "__main__":
    main()

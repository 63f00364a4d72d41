"""SGLang's own loaders and pools, called with as little around them as they need. After tests.contract.engine."""

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

LAYER = "model.layers.1."


class Parameter:
    """A parameter that remembers what a loader put into it."""

    def __init__(self, name: str, got: dict[str, float]) -> None:
        self.dtype = torch.float32
        self.weight_loader = lambda _param, value, *_, **__: got.__setitem__(name, float(value))


def load_glm(parameters: Iterable[str], tensors: Iterable[tuple[str, Tensor]], **kwargs: Any) -> dict[str, float]:
    """`Glm4MoeForCausalLM.load_weights` over named parameters: what each was given."""
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM

    got: dict[str, float] = {}
    config = types.SimpleNamespace(n_routed_experts=2, num_hidden_layers=2, num_nextn_predict_layers=1)
    model = types.SimpleNamespace(config=config, num_fused_shared_experts=0)
    params = {name: Parameter(name, got) for name in parameters}
    Glm4MoeForCausalLM.load_weights(model, tensors, params_dict=params, **kwargs)
    return got


def load_deepseek(parameters: Iterable[str], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """`DeepseekV2WeightLoaderMixin.do_load_weights`, which Kimi K2, K2.5 and GLM-5 share."""
    from sglang.srt.models.deepseek_common import deepseek_weight_loader as loader

    got: dict[str, float] = {}

    members = {
        "config": types.SimpleNamespace(
            n_routed_experts=2, q_lora_rank=16, num_hidden_layers=2, num_nextn_predict_layers=0
        ),
        "model": types.SimpleNamespace(start_layer=0, end_layer=2),
        "pp_group": types.SimpleNamespace(is_last_rank=True, is_first_rank=True),
        "quant_config": None,
        "num_fused_shared_experts": 0,
        "named_parameters": lambda _: [(name, Parameter(name, got)) for name in parameters],
        "post_load_weights": lambda _, **__: None,
    }
    before, loader.should_async_load = loader.should_async_load, lambda _: False
    try:
        type("Model", (loader.DeepseekV2WeightLoaderMixin,), members)().do_load_weights(tensors)
    finally:
        loader.should_async_load = before
    return got


def radix_attention(layer_id: int = 1, quant_config: Any = None) -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(4, 16, 0.25, 2, layer_id, quant_config=quant_config, prefix=f"{LAYER}self_attn.attn")


def compressed_tensors_config(scheme: dict[str, Any] | None) -> Any:
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    group = {"targets": [r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"], "format": "pack-quantized",
             "weights": weights, "input_activations": None}  # fmt: skip
    return CompressedTensorsConfig.from_config({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": scheme,
    })  # fmt: skip


def scatter(buffer: Tensor, loc: Tensor, nope: Tensor, rope: Tensor) -> None:
    """What the Triton kernel of the pool's write does."""
    buffer[loc] = torch.cat([nope, rope], dim=-1)


def gather(buffer: Tensor, loc: Tensor, nope: Tensor, rope: Tensor) -> None:
    """What the Triton kernel of the pool's read does."""
    rows = buffer[loc].to(nope.dtype)
    nope.copy_(rows[..., : nope.shape[-1]])
    rope.copy_(rows[..., nope.shape[-1] :])


def latent_pool(monkeypatch: Any) -> Any:
    """A real `MLATokenToKVPool` for FP8 on the CPU: latent of 32, rotated key of 16, two layers."""
    from sglang.srt.mem_cache import memory_pool

    for kernel in ("set_mla_kv_buffer_triton", "set_mla_kv_buffer_dcp_sharded_triton"):
        monkeypatch.setattr(memory_pool, kernel, scatter, raising=False)
    monkeypatch.setattr(memory_pool, "get_mla_kv_buffer_triton", gather)
    parallel = types.SimpleNamespace(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0, dcp_size=1)
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: parallel, raising=False)
    return memory_pool.MLATokenToKVPool(
        size=64, page_size=1, dtype=torch.float8_e4m3fn, kv_lora_rank=32, qk_rope_head_dim=16, layer_num=2,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def head_pool() -> Any:
    """A real `MHATokenToKVPool` for FP8 on the CPU: two heads of 16, two layers."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=64, page_size=1, dtype=torch.float8_e4m3fn, head_num=2, head_dim=16, layer_num=2, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip

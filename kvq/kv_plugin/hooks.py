"""The hooks. Registered with SGLang's own registry, in its processes only; torch and SGLang are there."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvq.kv_plugin import probe
from kvq.kv_plugin.scale_file import SCALE_NAMES, ScaleFile

logger = logging.getLogger(__name__)

RUNTIME = {"gqa": "attn", "mla": "attn_mqa"}  # the attention below self_attn that holds the parameters
# Backends whose writes divide and whose reads multiply. MLA: only Triton was run; the others that SGLang has for it
# either never multiply (fa3, flashinfer, cutlass) or quantize on their own (trtllm, tokenspeed).
BACKENDS = {"gqa": ("triton", "fa3", "flashinfer"), "mla": ("triton",)}
MLA_BACKEND_CLASS = "TritonAttnBackend"
MARK = "kvq_scaled_by"


def register(scales: ScaleFile) -> None:
    """Ask SGLang's registry for all hooks that this architecture needs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: list[tuple[str, Callable[..., Any], Any]] = [
        (f"{probe.RUNNER}.load_model", lambda _result, runner: check_loaded(scales, runner), HookType.AFTER)
    ]
    if scales.attention == "gqa":
        hooks += [
            (f"{probe.GLM}.Glm4MoeAttention.__init__", _after_glm_attention, HookType.AFTER),
            (f"{probe.GLM}.Glm4MoeForCausalLM.load_weights", _with_scales(scales), HookType.AROUND),
        ]
    else:
        hooks += [
            (f"{probe.DEEPSEEK}.__init__", _after_mla_attention, HookType.AFTER),
            (probe.DEEPSEEK_LOADER, _with_scales(scales), HookType.AROUND),
            (f"{probe.POOL}.set_mla_kv_buffer", write_latents, HookType.AROUND),
            (f"{probe.POOL}.get_mla_kv_buffer", read_latents, HookType.AROUND),
        ]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)


def _after_glm_attention(_result: None, attention: Any, *_: object, **__: object) -> None:
    give_method(attention.attn)


def _after_mla_attention(_result: None, attention: Any, *_: object, **__: object) -> None:
    if getattr(attention, "use_dsa", False) or hasattr(attention, "attn_mqa_for_dcp_decode"):
        raise RuntimeError(
            "kvq: sparse attention and decode context parallelism have no static KV scales; unset KVQ_KV_SCALES."
        )
    give_method(attention.attn_mqa)
    # Latents are written for attn_mha in a prefill without a prefix and for attn_mqa elsewhere, under one scale. In a
    # tuple, so that torch does not take it for a submodule.
    for layer in (attention.attn_mqa, attention.attn_mha):
        setattr(layer, MARK, (attention.attn_mqa,))


def give_method(attn: Any) -> None:
    """SGLang's own KV-cache method for an attention that has none: its loader then fills k_scale and v_scale."""
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

    if attn.quant_method is None:
        attn.quant_method = BaseKVCacheMethod(None)
        attn.quant_method.create_weights(attn)


def _with_scales(scales: ScaleFile) -> Callable[..., Any]:
    def load(original: Callable[..., Any], model: Any, weights: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        return original(model, exchange_scales(scales, weights), *args, **kwargs)

    return load


def exchange_scales(scales: ScaleFile, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The checkpoint's tensors without KV scales of its own, then the file's under the names of the parameters."""
    import torch

    for name, tensor in weights:
        if not name.endswith(tuple(f".{scale}" for scale in SCALE_NAMES)):
            yield name, tensor
    for layer, row in scales.layers.items():
        for scale_name, scale in row.items():
            name = f"model.layers.{layer}.self_attn.{RUNTIME[scales.attention]}.{scale_name}"
            yield name, torch.tensor(scale, dtype=torch.float32)


def check_loaded(scales: ScaleFile, runner: Any) -> None:
    """After loading: the cache is FP8, the backend one that uses scales, and every layer holds the file's scales."""
    args = runner.server_args
    if args.kv_cache_dtype != "fp8_e4m3":
        raise RuntimeError(f"kvq: KVQ_KV_SCALES needs --kv-cache-dtype fp8_e4m3, found {args.kv_cache_dtype}.")
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        found, allowed = getattr(args, flag, None), BACKENDS[scales.attention]
        if found is not None and found not in allowed:
            raise RuntimeError(
                f"kvq: --{flag.replace('_', '-')} {found} does not use KV scales rightly; use {allowed[0]}."
            )
    if getattr(runner, "is_draft_worker", False):
        return  # an MTP layer that the file lacks stays at 1.0
    held = {
        name: module
        for name, module in runner.model.named_modules()
        if name.endswith(f".self_attn.{RUNTIME[scales.attention]}")
    }
    for name, module in held.items():
        expected = [scales.layers[module.layer_id][scale] for scale in SCALE_NAMES]
        found = [getattr(module, f"{scale}_float", None) for scale in SCALE_NAMES]
        if not all(
            value is not None and abs(value - want) <= 1e-6 * want for value, want in zip(found, expected, strict=True)
        ):
            raise RuntimeError(f"kvq: {name} holds the scales {found} after loading, {scales.path} says {expected}.")
    if not held:
        raise RuntimeError(f"kvq: {type(runner.model).__name__} has no attention that {scales.path} was made for.")
    logger.warning("kvq: FP8 KV scales of %d layers from %s are in use", len(held), scales.path)


def _scale_of(layer: Any, pool: Any) -> float:
    """What latents of this layer are divided by; 1.0 for a layer that the plugin has not touched."""
    owner = getattr(layer, MARK, None)
    if owner is None:
        return 1.0
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = type(get_attn_backend()).__name__
    if backend != MLA_BACKEND_CLASS or type(pool).__name__ != "MLATokenToKVPool":
        raise RuntimeError(
            f"kvq: {backend} with {type(pool).__name__} does not use KV scales rightly for MLA; serve with "
            "--attention-backend triton, or unset KVQ_KV_SCALES."
        )
    return float(owner[0].k_scale_float)


def write_latents(
    original: Callable[..., None], pool: Any, layer: Any, loc: Any, cache_k_nope: Any, cache_k_rope: Any, **more: Any
) -> None:
    """`set_mla_kv_buffer`: divides what the engine only casts. The Triton backend multiplies when it reads."""
    scale = _scale_of(layer, pool)
    if scale != 1.0:
        cache_k_nope, cache_k_rope = cache_k_nope / scale, cache_k_rope / scale
    original(pool, layer, loc, cache_k_nope, cache_k_rope, **more)


def read_latents(original: Callable[..., Any], pool: Any, layer: Any, loc: Any, dst_dtype: Any = None) -> Any:
    """`get_mla_kv_buffer`: multiplies what was divided, for prefills that expand cached latents."""
    scale = _scale_of(layer, pool)
    if scale != 1.0 and dst_dtype is None:
        raise RuntimeError("kvq: latents are read back without a type to scale them in; unset KVQ_KV_SCALES.")
    latent, k_pe = original(pool, layer, loc, dst_dtype)
    return (latent, k_pe) if scale == 1.0 else (latent * scale, k_pe * scale)

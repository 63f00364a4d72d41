"""Is this the SGLang that the hooks were written for? Asked before anything is changed.

Besides names and parameters, a few lines of the engine's own source are looked for: what the hooks add is right only
beside what the engine does itself, and a version that divides or multiplies elsewhere would do it twice.
"""

import inspect
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from kvq.kv_plugin.scale_file import PluginError

OLDEST, NEWEST = (0, 5, 17), (0, 5, 23)  # both were run; what lies between must pass the probe


@dataclass(frozen=True)
class Expected:
    """A callable by its full name: how its parameters begin, and what its source must and must not hold."""

    target: str
    parameters: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


KV_METHOD = "sglang.srt.layers.quantization.kv_cache.BaseKVCacheMethod"
GLM = "sglang.srt.models.glm4_moe"
DEEPSEEK = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA"
DEEPSEEK_LOADER = "sglang.srt.models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin.do_load_weights"
POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"
MHA_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
TRITON = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"

COMMON = (
    Expected(f"{KV_METHOD}.create_weights", ("self", "layer"), holds=("layer.k_scale", "layer.v_scale")),
    Expected(f"{KV_METHOD}.process_weights_after_loading", ("self", "layer"), holds=("k_scale_float", "v_scale_float")),
    Expected(f"{RUNNER}.load_model", ("self",)),
)
EXPECTED: Mapping[str, tuple[Expected, ...]] = {
    "gqa": (
        *COMMON,
        Expected(f"{GLM}.Glm4MoeAttention.__init__", ("self",), holds=("self.attn = RadixAttention(",)),
        Expected(f"{GLM}.Glm4MoeForCausalLM.load_weights", ("self", "weights", "is_nextn")),
        Expected(
            f"{MHA_POOL}.set_kv_buffer", ("self", "layer"), holds=("cache_k.div_(k_scale)", "cache_v.div_(v_scale)"),
        ),
    ),
    "mla": (
        *COMMON,
        Expected(f"{DEEPSEEK}.__init__", ("self",), holds=("self.attn_mqa = RadixAttention(", "self.attn_mha = Radix")),
        Expected(DEEPSEEK_LOADER, ("self", "weights", "is_nextn")),
        Expected(f"{TRITON}.forward_decode", holds=("k.div_(layer.k_scale)", "k_descale = layer.k_scale_float")),
        Expected(f"{TRITON}.forward_extend", holds=(".div_(layer.k_scale)", "k_descale = layer.k_scale_float")),
        Expected(f"{POOL}.set_kv_buffer", ("self", "layer"), lacks=("scale",)),
        Expected(
            f"{POOL}.set_mla_kv_buffer",
            ("self", "layer", "loc", "cache_k_nope", "cache_k_rope"),
            holds=("_write_mla_kv_buffer(",),
            lacks=("scale",),
        ),
        Expected(f"{POOL}.get_mla_kv_buffer", ("self", "layer", "loc", "dst_dtype"), lacks=("scale",)),
    ),
}  # fmt: skip


def check_engine(attention: str) -> None:
    """Raises PluginError at the first thing that is not as expected."""
    found = engine_version()
    if not OLDEST <= found <= NEWEST:
        raise PluginError(
            f"the plugin knows SGLang {_text(OLDEST)} to {_text(NEWEST)}, this is {_text(found)}; use one of these, or "
            "a newer kvq."
        )
    for expected in EXPECTED[attention]:
        problem = _problem(expected)
        if problem:
            raise PluginError(f"this SGLang ({_text(found)}) is not as the plugin knows it: {problem}.")


def engine_version() -> tuple[int, ...]:
    """Raises PluginError when there is none."""
    try:
        text = version("sglang")
    except PackageNotFoundError:
        raise PluginError("SGLang is not installed here as a package.") from None
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _problem(expected: Expected) -> str:
    """What is different, in words; empty when nothing is."""
    try:
        function = pkgutil.resolve_name(expected.target)
    except (ImportError, AttributeError) as error:
        return f"there is no {expected.target} ({error})"
    names = [name.removesuffix("_info") for name in inspect.signature(function).parameters]
    if tuple(names[: len(expected.parameters)]) != expected.parameters:
        return f"{expected.target} takes {', '.join(names)}"
    text = inspect.getsource(function)
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in expected.holds:
        if line not in body:
            return f"{expected.target} no longer holds `{line}`"
    for line in expected.lacks:
        if line in body:
            return f"{expected.target} now holds `{line}`"
    return ""


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

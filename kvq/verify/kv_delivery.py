"""What an engine does with static FP8 KV scales in a checkpoint: one table, by engine version and attention.

Each row was read in the engine's source at that version, or run; `source` says where. What has no row is unknown, and
unknown is not delivered. The convention everywhere: stored = x / scale, so scale = amax / 448.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvq.checkpoint.architecture import Attention

Target = Literal["sglang", "vllm", "transformers"]
Verdict = Literal["used", "ignored", "withheld"]
Condition = Literal["compressed-tensors", "kv_cache_scheme", "fp8"]

# Stands in config.json beside delivered scales. vLLM and SGLang 0.5.23 then also take FP8 as the cache's default type.
KV_CACHE_SCHEME: Mapping[str, Any] = {
    "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False,
}  # fmt: skip
SCALE_NAMES = ("k_scale", "v_scale")


@dataclass(frozen=True, slots=True)
class Delivery:
    """One cell of the table.

    `names` are what a `used` cell gets, below a layer. `loads` are patterns of names below a layer that the loader
    knows, with the parameter that each ends in; a name that no pattern matches is dropped, or ends the start where one
    of `stops_at` matches. The parameters exist under any of `parameters_when`: a quantization config of that method, or
    one with a `kv_cache_scheme`.
    """

    target: Target
    version: str
    attention: Attention
    verdict: Verdict
    reason: str
    source: str
    divides_on_write: str
    multiplies_on_read: str
    loads: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    parameters_when: tuple[Condition, ...] = ()
    stops_at: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        return f"{self.target} {self.version}"

    def sentence(self) -> str:
        """As reports print it."""
        return {
            "used": f"used by {self.engine}",
            "ignored": f"ignored by {self.engine}: {self.reason}",
            "withheld": f"withheld: would corrupt ({self.engine}: {self.reason})",
        }[self.verdict]

    def lands_in(self, below: str, conditions: frozenset[str]) -> str | None:
        """The parameter, below a layer, that a name of the checkpoint ends in; None where the engine drops it."""
        if not conditions.intersection(self.parameters_when):
            return None
        for pattern, parameter in self.loads.items():
            if re.fullmatch(pattern, below):
                return re.sub(pattern, parameter, below)
        return None

    def refuses(self, below: str, conditions: frozenset[str]) -> bool:
        """Whether the engine does not start with a tensor of this name."""
        return self.lands_in(below, conditions) is None and any(re.fullmatch(name, below) for name in self.stops_at)


_SGLANG_GQA = Delivery(
    "sglang", "0.5.23", "gqa", "ignored",
    reason="Glm4MoeAttention builds its RadixAttention without a quantization config, so no scale parameter exists and "
    "load_weights skips the tensors without a word; the cache is kept at 1.0 (kvq's plugin changes that)",
    source="srt/models/glm4_moe.py: Glm4MoeAttention.__init__, Glm4MoeForCausalLM.load_weights",
    divides_on_write="no: the pool divides by the attention's k_scale and v_scale, which are None",
    multiplies_on_read="no: triton, fa3 and flashinfer multiply by the attention's scales, which are None",
)  # fmt: skip
_SGLANG_MLA = Delivery(
    "sglang", "0.5.23", "mla", "withheld",
    reason="flashmla and trtllm_mla multiply by k_scale and never divide on write; triton divides in decode, not in a "
    "prefill without a prefix; fa3 and flashinfer do neither (kvq's plugin makes triton whole)",
    source="srt/mem_cache/memory_pool.py: MLATokenToKVPool; srt/layers/attention/*_backend.py; "
    "srt/models/deepseek_common/attention_forward_methods/forward_mha.py: _set_mla_kv_buffer",
    divides_on_write="MLATokenToKVPool never; TritonAttnBackend before it",
    multiplies_on_read="triton, flashmla and trtllm_mla do; fa3 and flashinfer do not",
    loads={
        r"self_attn\.attn_(mqa|mha)\.([kv])_scale": r"self_attn.attn_\1.\2_scale",
        r"self_attn\.([kv])_proj\.\1_scale": r"self_attn.attn_mqa.\1_scale",
    },
    parameters_when=("fp8", "kv_cache_scheme"),
)  # fmt: skip
_SGLANG_DSA = replace(
    _SGLANG_MLA,
    attention="dsa",
    reason="the engine scales dynamically: flashmla_kv keeps a float32 scale for 128 latent values each, and "
    "the indexer's keys have their own; the trtllm backend would multiply by a k_scale that nothing was divided by",
    source="srt/layers/attention/dsa/dsa_quant_k_cache.py, dsa_backend.py; memory_pool.py: DSATokenToKVPool",
    divides_on_write="by its own dynamic scales; trtllm not at all",
    multiplies_on_read="by its own dynamic scales; trtllm by k_scale",
)
_VLLM_MLA = Delivery(
    "vllm", "0.32.0", "mla", "ignored",
    reason="compressed-tensors gives MLAAttention no KV-cache method, and every name of a scale is mapped below .attn, "
    "which MLA does not have; the cache is kept at 1.0",
    source="model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: get_quant_method; "
    "quantization/base_config.py: get_cache_scale_mapper; model_loader/weight_utils.py: maybe_remap_kv_scale_name",
    divides_on_write="yes, by _k_scale, which stays 1.0",
    multiplies_on_read="yes, by _k_scale; cutlass_mla refuses any but 1.0",
    stops_at=(r".*\.output_scale",),  # models/deepseek_v2.py: params_dict[name]
)  # fmt: skip
_TRANSFORMERS_GQA = Delivery(
    "transformers", "5.17", "gqa", "used",
    reason="",
    source="compressed_tensors 0.19 modeling/kvcache.py: QuantizedKVCache.forward (run: loaded, and a scale too small "
    "changes the logits)",
    divides_on_write="yes, and rounds to FP8: a simulation, the cache itself stays in the model's type",
    multiplies_on_read="yes, at once",
    loads={r"self_attn\.([kv])_scale": r"self_attn.\1_scale"},
    names={name: f"self_attn.{name}" for name in SCALE_NAMES},
    parameters_when=("kv_cache_scheme",),
)  # fmt: skip

TABLE: tuple[Delivery, ...] = (
    replace(_SGLANG_GQA, version="0.5.17"),
    _SGLANG_GQA,
    # 0.5.17 does not hand kv_cache_scheme to its compressed-tensors config.
    replace(_SGLANG_MLA, version="0.5.17", parameters_when=("fp8",)),
    _SGLANG_MLA,
    replace(_SGLANG_DSA, version="0.5.17", parameters_when=("fp8",)),
    _SGLANG_DSA,
    Delivery(
        "vllm", "0.32.0", "gqa", "used",
        reason="",
        source="model_executor/models/glm4_moe.py: Glm4MoeAttention (Attention with a quantization config); "
        "quantization/base_config.py: get_cache_scale_mapper; layers/attention/attention.py: Attention.__init__",
        divides_on_write="yes: reshape_and_cache_flash gets _k_scale and _v_scale",
        multiplies_on_read="yes: k_descale and v_descale of flash_attn, flashinfer, triton_attn",
        loads={
            r"self_attn\.(?:attn\.)?([kv])_scale": r"self_attn.attn.\1_scale",
            r"self_attn\.[kv]_proj\.([kv])_scale": r"self_attn.attn.\1_scale",
            r"self_attn\.qk(?:qk)?v_proj\.([kv])_scale": r"self_attn.attn.\1_scale",
            r"self_attn\.([kv])_cache\.scale": r"self_attn.attn.\1_scale",
            r"self_attn\.kv_scale": r"self_attn.attn.k_scale",
        },
        names={name: f"self_attn.{name}" for name in SCALE_NAMES},
        parameters_when=("compressed-tensors", "kv_cache_scheme", "fp8"),
        stops_at=(".*",),  # models/utils.py: AutoWeightsLoader, "There is no module or parameter named"
    ),
    _VLLM_MLA,
    replace(
        _VLLM_MLA, attention="dsa",
        reason="the engine scales dynamically (fp8_ds_mla: a float32 scale for 128 latent values), and "
        "MLAAttention gets no KV-cache method under compressed-tensors",
        divides_on_write="by its own dynamic scales",
        multiplies_on_read="by its own dynamic scales",
    ),
    _TRANSFORMERS_GQA,
    replace(_TRANSFORMERS_GQA, attention="mla"),  # k_scale for the latent, v_scale for the rotated key: equal here
    replace(
        _TRANSFORMERS_GQA, attention="dsa", verdict="withheld", names={},
        reason="the quantized cache has no update_indexer, so the forward fails; and it would scale expanded keys and "
        "values, which no engine stores",
        divides_on_write="expanded keys and values", multiplies_on_read="expanded keys and values",
    ),
)  # fmt: skip


def known_target(name: object) -> Target:
    """A target by its name; SGLang for any other."""
    known: Mapping[str, Target] = {"vllm": "vllm", "transformers": "transformers"}
    return known.get(str(name), "sglang")  # from a manifest, where it may be anything


def deliveries(target: Target, attention: Attention) -> list[Delivery]:
    """The rows of a target, oldest version first."""
    return [row for row in TABLE if (row.target, row.attention) == (target, attention)]


def checkpoint_names(target: Target, attention: Attention) -> Mapping[str, str]:
    """Scale -> name below a layer, for scales that belong into the checkpoint; empty where any listed version of the
    target does not use them rightly."""
    rows = deliveries(target, attention)
    return rows[-1].names if rows and all(row.verdict == "used" for row in rows) else {}


def conditions_of(quantization: Mapping[str, Any] | None) -> frozenset[str]:
    """What of `parameters_when` a config.json's quantization_config fulfils."""
    described = quantization or {}
    method = str(described.get("quant_method", ""))
    return frozenset({method} | ({"kv_cache_scheme"} if described.get("kv_cache_scheme") else set()))

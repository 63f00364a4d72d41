"""Bytes of KV cache that a token takes, by architecture, dtype and engine layout.

GQA keeps a key and a value per head; MLA one latent of kv_lora_rank + rope (576) for all heads; DSA also an indexer key
in each layer that has an indexer of its own. A layer that shares another's indexer keeps none.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvq.checkpoint.architecture import ModelFacts
from kvq.recipes.tally import Kind

KvDtype = Literal["bf16", "fp8_e4m3"]
KV_DTYPES: tuple[KvDtype, ...] = ("bf16", "fp8_e4m3")
BYTES = {"bf16": 2, "fp8_e4m3": 1}
DSA_GROUP = 128  # channels of the latent that share a float32 scale in the 656-byte layout
INDEX_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`bytes_per_token` of a whole model without its MTP layer; `on_each_gpu` of what one GPU of a TP group keeps."""

    name: str
    dtype: KvDtype
    bytes_per_token: int
    on_each_gpu: int


def num_indexer_layers(kinds: Iterable[Kind]) -> int:
    """Decoder layers with an indexer of their own, by their tensors."""
    return sum(kind.tensors for kind in kinds if kind.below == "self_attn.indexer.wk.weight" and not kind.mtp)


def kv_layouts(facts: ModelFacts, indexer_layers: int, attention_tp: int = 1) -> list[KvLayout]:
    """The layouts that engines use; for DSA also the plain one that published BF16 figures count."""
    text, layers = facts.text_config, facts.num_layers
    if facts.arch.attention == "gqa":
        heads, width = int(text["num_key_value_heads"]), int(text["head_dim"])
        own = max(1, heads // attention_tp)
        return [
            KvLayout(
                f"GQA {heads}x{width}", dtype, *(2 * count * width * BYTES[dtype] * layers for count in (heads, own))
            )
            for dtype in KV_DTYPES
        ]
    latent, rope = int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
    width = latent + rope
    if facts.arch.attention == "mla":
        return [_whole(f"MLA {width}", dtype, layers * width * BYTES[dtype]) for dtype in KV_DTYPES]
    key = int(text["index_head_dim"])
    plain, packed = indexer_layers * key * 2, indexer_layers * (key + INDEX_SCALE_BYTES)
    scaled = latent + latent // DSA_GROUP * 4 + rope * 2
    return [
        _whole(f"DSA {width}, FP8 indexer keys (SGLang)", "bf16", layers * width * 2 + packed),
        _whole(f"DSA {width}, BF16 indexer keys (as published)", "bf16", layers * width * 2 + plain),
        _whole(f"DSA {scaled}-byte (SGLang flashmla_kv, vLLM fp8_ds_mla)", "fp8_e4m3", layers * scaled + packed),
        _whole(f"DSA {width}-byte (SGLang trtllm, SM100)", "fp8_e4m3", layers * width + packed),
    ]


def _whole(name: str, dtype: KvDtype, nbytes: int) -> KvLayout:
    """One latent serves all heads, so each GPU of a TP group keeps all of it."""
    return KvLayout(name, dtype, nbytes, nbytes)

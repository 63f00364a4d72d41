"""The delivery table says what SGLang's real loaders and configs do."""

from typing import Any

import pytest

pytest.importorskip("tests.contract.engine", reason="make contract")
import torch

from kvq.checkpoint.architecture import Attention
from kvq.verify.kv_delivery import KV_CACHE_SCHEME, Delivery, deliveries
from tests.contract.kv import rig

NAMES = (
    "self_attn.k_scale", "self_attn.v_scale", "self_attn.attn.k_scale", "self_attn.attn_mqa.k_scale",
    "self_attn.attn_mqa.v_scale", "self_attn.attn_mha.k_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale",
    "self_attn.kv_a_proj_with_mqa.k_scale", "self_attn.kv_b_proj.k_scale", "self_attn.k_proj.output_scale",
)  # fmt: skip
MLA_PARAMETERS = [f"{rig.LAYER}self_attn.{a}.{s}_scale" for a in ("attn_mqa", "attn_mha") for s in "kv"]


def row_of(attention: Attention) -> Delivery:
    from importlib.metadata import version

    return next(row for row in deliveries("sglang", attention) if row.version == version("sglang"))


@pytest.mark.parametrize("below", NAMES)
def test_latent_scales_land_where_the_table_says(below: str) -> None:
    got = rig.load_deepseek(MLA_PARAMETERS, [(rig.LAYER + below, torch.tensor(0.5))])
    expected = row_of("mla").lands_in(below, frozenset({"fp8"}))
    assert got == ({} if expected is None else {rig.LAYER + expected: 0.5})


@pytest.mark.parametrize("below", NAMES)
def test_glm_loader_drops_scales_without_a_word(below: str) -> None:
    assert rig.load_glm([rig.LAYER + "self_attn.qkv_proj.weight"], [(rig.LAYER + below, torch.tensor(0.5))]) == {}
    assert row_of("gqa").lands_in(below, frozenset({"fp8", "compressed-tensors", "kv_cache_scheme"})) is None


def test_glm_attention_is_built_without_a_quantization_config() -> None:
    import inspect

    from sglang.srt.models.glm4_moe import Glm4MoeAttention

    source = inspect.getsource(Glm4MoeAttention.__init__)
    call = source[source.index("self.attn = RadixAttention(") :]
    assert "quant_config" not in call[: call.index("\n        )")]


@pytest.mark.parametrize("scheme", [None, dict(KV_CACHE_SCHEME)], ids=["none", "scheme"])
def test_compressed_tensors_makes_parameters_when_the_table_says(scheme: dict[str, Any] | None) -> None:
    attention = rig.radix_attention(quant_config=rig.compressed_tensors_config(scheme))
    conditions = {"compressed-tensors"} | ({"kv_cache_scheme"} if scheme else set())
    expected = bool(conditions.intersection(row_of("mla").parameters_when))
    assert (attention.k_scale is not None) == expected


def test_fp8_config_makes_parameters() -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    attention = rig.radix_attention(quant_config=Fp8Config(is_checkpoint_fp8_serialized=True))
    assert attention.k_scale is not None and "fp8" in row_of("mla").parameters_when


def test_no_class_of_ours_loads_a_quantization_param_path() -> None:
    from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM, GlmMoeDsaForCausalLM
    from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration

    for cls in (DeepseekV3ForCausalLM, Glm4MoeForCausalLM, GlmMoeDsaForCausalLM, KimiK25ForConditionalGeneration):
        assert not hasattr(cls, "load_kv_cache_scales")


def test_the_latent_pool_never_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plugin: what a prefill writes is not what a decode that divided would have written."""
    pool, layer = rig.latent_pool(monkeypatch), rig.radix_attention(0)
    layer.k_scale_float = 4.0
    latent, k_pe = torch.full((1, 1, 32), 8.0), torch.full((1, 1, 16), 4.0)
    pool.set_mla_kv_buffer(layer, torch.tensor([3]), latent, k_pe)
    kept = pool.get_key_buffer(0)[3].float()
    assert torch.equal(kept, torch.cat([latent, k_pe], -1)[0])

"""The KV hook sees what an engine stores, and attention reads what it gives back.

Shape suffixes: N = sequences, S = tokens per sequence, H = hidden size.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq.calibration.kv_hook import KV_NAMES, KvHook, install_kv_hook
from kvq.checkpoint.architecture import ARCHITECTURES
from tests.calibration.models import layer_with_experts, open_runner, random_tokens
from tests.checkpoints import TINY, make_checkpoint

LAYER = 1
LONG = 40  # more than index_topk: the indexer runs
FAMILIES = ["glm_moe_dsa", "glm4_moe", "deepseek_v3"]


def run_layer(folder: Path, hook: KvHook | None) -> Tensor:
    """Output of one layer on random tokens."""
    runner = open_runner(folder)
    store = runner.embed(random_tokens(2, LONG))
    module = layer_with_experts(runner, LAYER)
    if hook is not None:
        install_kv_hook(module.self_attn, runner.facts.arch.attention, LAYER, hook)
    runner.run(module, LAYER, store)
    return store.hidden_NSH


@pytest.mark.parametrize("family", FAMILIES)
def test_sees_what_engines_store_and_changes_nothing(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "source", family, "bf16")
    seen: dict[str, tuple[int, ...]] = {}

    def look(layer: int, name: str, tensor: Tensor) -> Tensor:
        assert layer == LAYER and name not in seen
        seen[name] = tuple(tensor.shape)
        return tensor

    assert torch.equal(run_layer(folder, look), run_layer(folder, None))
    if family == "glm4_moe":
        heads = (2, TINY.num_key_value_heads, LONG, TINY.head_dim)
        assert seen == {"key": heads, "value": heads}
    else:
        latents = {"latent": (2, 1, LONG, TINY.kv_lora_rank), "k_pe": (2, 1, LONG, TINY.qk_rope_head_dim)}
        index = {"index_key": (2, LONG, TINY.index_head_dim)} if family == "glm_moe_dsa" else {}
        assert seen == latents | index


@pytest.mark.parametrize(("family", "name"), [(f, n) for f in FAMILIES for n in KV_NAMES[ARCHITECTURES[f].attention]])
def test_attention_reads_what_the_hook_gives(tmp_path: Path, family: str, name: str) -> None:
    """Each tensor by itself: negated, it changes the output."""
    folder = make_checkpoint(tmp_path / "source", family, "bf16")
    changed = run_layer(folder, lambda _layer, n, tensor: -tensor if n == name else tensor)
    assert (changed - run_layer(folder, None)).abs().max() > 1e-3


def test_keys_are_normed_and_rotated(tmp_path: Path) -> None:
    """GQA: the key of the first position is the normed projection (no rotation there); later ones are rotated."""
    runner = open_runner(make_checkpoint(tmp_path / "source", "glm4_moe", "bf16"))
    module = layer_with_experts(runner, LAYER)
    store = runner.embed(random_tokens(1, 4))
    normed_SH = module.input_layernorm(store.hidden_NSH)[0]
    attention = module.self_attn
    plain = attention.k_norm(attention.k_proj(normed_SH).view(4, -1, attention.head_dim)).transpose(0, 1)
    kept: dict[str, Tensor] = {}
    install_kv_hook(attention, "gqa", LAYER, lambda _l, name, tensor: kept.setdefault(name, tensor))
    runner.run(module, LAYER, store)
    torch.testing.assert_close(kept["key"][0, :, 0], plain[:, 0])
    assert (kept["key"][0, :, 1:] - plain[:, 1:]).abs().max() > 1e-3
    torch.testing.assert_close(kept["key"].norm(dim=-1)[0], plain.norm(dim=-1))


@pytest.mark.parametrize(("family", "attention"), [("deepseek_v3", "mla"), ("glm_moe_dsa", "dsa")])
def test_latents_are_normed_and_rotated(tmp_path: Path, family: str, attention: str) -> None:
    runner = open_runner(make_checkpoint(tmp_path / "source", family, "bf16"))
    module = layer_with_experts(runner, LAYER)
    store = runner.embed(random_tokens(1, 4))
    joined = module.self_attn.kv_a_proj_with_mqa(module.input_layernorm(store.hidden_NSH)[0])
    latent, k_pe = joined.split([TINY.kv_lora_rank, TINY.qk_rope_head_dim], dim=-1)
    kept: dict[str, Tensor] = {}
    install_kv_hook(
        module.self_attn, runner.facts.arch.attention, LAYER, lambda _l, name, tensor: kept.setdefault(name, tensor)
    )
    assert runner.facts.arch.attention == attention
    runner.run(module, LAYER, store)
    torch.testing.assert_close(kept["latent"][0, 0], module.self_attn.kv_a_layernorm(latent))
    torch.testing.assert_close(kept["k_pe"][0, 0].norm(dim=-1), k_pe.norm(dim=-1))
    assert (kept["k_pe"][0, 0, 1:] - k_pe[1:]).abs().max() > 1e-3

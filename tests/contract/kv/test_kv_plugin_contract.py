"""The plugin in SGLang's real registry, loaders, attention layers and pools."""

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.contract.engine", reason="make contract")
import torch

from kvq.kv_plugin import ENVIRONMENT, hooks, install, probe
from kvq.kv_plugin.scale_file import ScaleFile
from tests.contract.kv import rig

GQA = ScaleFile("file", "gqa", 2, {layer: {"k_scale": 0.5, "v_scale": 0.25} for layer in range(3)})
MLA = ScaleFile("file", "mla", 2, {layer: {"k_scale": 4.0, "v_scale": 4.0} for layer in range(2)})


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_the_probe_knows_this_version(attention: str) -> None:
    probe.check_engine(attention)


@pytest.fixture
def registry() -> Iterator[Any]:
    """SGLang's own, empty before, and with its patches undone after."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets = [expected.target for rows in probe.EXPECTED.values() for expected in rows]
    before = {target: _resolve(target) for target in targets}
    HookRegistry.reset()
    yield HookRegistry
    HookRegistry.reset()
    for (owner, name), function in before.values():
        setattr(owner, name, function)


def _resolve(target: str) -> tuple[tuple[Any, str], Any]:
    import pkgutil

    path, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(path)
    return (owner, name), getattr(owner, name)


def scale_file(folder: Path, attention: str) -> Path:
    layers = {str(layer): {"k_scale": 0.5, "v_scale": 0.5} for layer in range(2)}
    content = {
        "schema": "kvq.kv-scales/1",
        "dtype": "fp8_e4m3",
        "attention": attention,
        "num_layers": 2,
        "layers": layers,
    }
    path = folder / "kv_cache_scales.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_every_hook_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Any, attention: str) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(scale_file(tmp_path, attention)))
    install()
    registered = set(registry._hooks)
    registry.apply_hooks()
    assert registry._patched == registered and len(registered) == {"gqa": 3, "mla": 5}[attention]


def test_nothing_is_registered_unless_asked(monkeypatch: pytest.MonkeyPatch, registry: Any) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    install()
    assert not registry._hooks


@pytest.mark.parametrize("attention", ["dsa", "gqa-broken"])
def test_a_file_that_cannot_be_used_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Any, attention: str
) -> None:
    """SystemExit, which SGLang's loader of plugins does not catch; anything else it would log and go on."""
    monkeypatch.setenv(ENVIRONMENT, str(scale_file(tmp_path, attention)))
    with pytest.raises(SystemExit, match="was not started"):
        install()
    assert not registry._hooks


def test_glm_scales_go_through_the_models_own_loader_into_the_engines_method() -> None:
    attention = rig.radix_attention(1)
    hooks._after_glm_attention(None, types.SimpleNamespace(attn=attention))
    parameters = [f"{rig.LAYER}self_attn.attn.{name}" for name, _ in attention.named_parameters()]
    assert parameters == [f"{rig.LAYER}self_attn.attn.{s}_scale" for s in "kv"]
    stale = (f"{rig.LAYER}self_attn.attn.k_scale", torch.tensor(99.0))
    got = rig.load_glm(parameters, hooks.exchange_scales(GQA, [stale]))
    assert got == {parameters[0]: 0.5, parameters[1]: 0.25}
    attention.k_scale.data.fill_(got[parameters[0]])
    attention.v_scale.data.fill_(got[parameters[1]])
    attention.quant_method.process_weights_after_loading(attention)
    assert (attention.k_scale_float, attention.v_scale_float) == (0.5, 0.25)


def test_glm_draft_layer_gets_its_own_scale() -> None:
    parameters = [f"model.decoder.self_attn.attn.{s}_scale" for s in "kv"]
    got = rig.load_glm(parameters, hooks.exchange_scales(GQA, []), is_nextn=True)
    assert got == {parameters[0]: 0.5, parameters[1]: 0.25}


def test_an_attention_that_got_no_scale_stays_at_one() -> None:
    attention = rig.radix_attention(1)
    hooks.give_method(attention)
    attention.quant_method.process_weights_after_loading(attention)
    assert (attention.k_scale_float, attention.v_scale_float) == (1.0, 1.0)


def test_glm_pool_divides_by_the_scales() -> None:
    pool, attention = rig.head_pool(), rig.radix_attention(1)
    key, value = torch.full((1, 2, 16), 3.0), torch.full((1, 2, 16), 5.0)
    pool._store_kv_layer = lambda layer, loc, k, v: (  # the kernel of the write
        pool.k_buffer[layer].__setitem__(loc, k), pool.v_buffer[layer].__setitem__(loc, v),
    )  # fmt: skip
    pool.set_kv_buffer(attention, torch.tensor([2]), key.clone(), value.clone(), torch.tensor(0.5), torch.tensor(0.25))
    keys, values = pool.get_kv_buffer(1)
    assert torch.equal(keys[2].float() * 0.5, key[0]) and torch.equal(values[2].float() * 0.25, value[0])


def latents(scale: float) -> tuple[Any, Any]:
    """attn_mqa and attn_mha of one MLA attention with the hook's mark, after loading."""
    mqa, mha = rig.radix_attention(0), rig.radix_attention(0)
    hooks._after_mla_attention(None, types.SimpleNamespace(attn_mqa=mqa, attn_mha=mha, use_dsa=False))
    mqa.k_scale.data.fill_(scale)
    mqa.v_scale.data.fill_(scale)
    mqa.quant_method.process_weights_after_loading(mqa)
    return mqa, mha


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that the hooks find at work."""
    from sglang.srt.model_executor import forward_context

    backend = type(hooks.MLA_BACKEND_CLASS, (), {})()
    monkeypatch.setattr(forward_context, "get_attn_backend", lambda: backend)


def test_both_ways_of_writing_latents_leave_the_same_bytes(monkeypatch: pytest.MonkeyPatch, triton: None) -> None:
    """A prefill without a prefix (through the hook) and a decode (Triton divides itself), and they read back alike."""
    pool, (mqa, mha) = rig.latent_pool(monkeypatch), latents(4.0)
    original = type(pool).set_mla_kv_buffer
    generator = torch.Generator().manual_seed(0)
    latent, k_pe = (1500 * torch.randn(1, 1, width, generator=generator) for width in (32, 16))
    hooks.write_latents(original, pool, mha, torch.tensor([1]), latent, k_pe)
    joined = torch.cat([latent, k_pe], -1)
    pool.set_kv_buffer(mqa, torch.tensor([2]), joined.clone().div_(mqa.k_scale), latent)
    rows = pool.get_key_buffer(0)[1:3].float()
    assert torch.equal(rows[0], rows[1])
    read = hooks.read_latents(type(pool).get_mla_kv_buffer, pool, mqa, torch.tensor([1]), torch.float32)
    wanted = joined.clamp(-448 * 4, 448 * 4)
    torch.testing.assert_close(torch.cat(read, -1), wanted, rtol=1 / 15, atol=1e-2)


def test_writing_does_not_change_what_attention_reads_next(monkeypatch: pytest.MonkeyPatch, triton: None) -> None:
    pool, (_, mha) = rig.latent_pool(monkeypatch), latents(4.0)
    latent, k_pe = torch.full((1, 1, 32), 8.0), torch.full((1, 1, 16), 4.0)
    hooks.write_latents(type(pool).set_mla_kv_buffer, pool, mha, torch.tensor([1]), latent, k_pe)
    assert bool((latent == 8).all() and (k_pe == 4).all())


def test_layers_that_the_plugin_has_not_touched_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, layer = rig.latent_pool(monkeypatch), rig.radix_attention(0)
    latent, k_pe = torch.full((1, 1, 32), 8.0), torch.full((1, 1, 16), 4.0)
    hooks.write_latents(type(pool).set_mla_kv_buffer, pool, layer, torch.tensor([1]), latent, k_pe)
    assert torch.equal(pool.get_key_buffer(0)[1].float(), torch.cat([latent, k_pe], -1)[0])


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor import forward_context

    monkeypatch.setattr(forward_context, "get_attn_backend", lambda: type("FlashAttentionBackend", (), {})())
    pool, (_, mha) = rig.latent_pool(monkeypatch), latents(4.0)
    with pytest.raises(RuntimeError, match="--attention-backend triton"):
        hooks.write_latents(
            type(pool).set_mla_kv_buffer, pool, mha, torch.tensor([1]), torch.ones(1, 1, 32), torch.ones(1, 1, 16)
        )


def test_latent_scales_go_through_the_models_own_loader() -> None:
    parameters = [f"{rig.LAYER}self_attn.attn_mqa.{s}_scale" for s in "kv"]
    got = rig.load_deepseek(parameters, hooks.exchange_scales(MLA, []))
    assert got == dict.fromkeys(parameters, 4.0)

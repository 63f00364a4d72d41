"""The plugin's parts that need no engine: the file, the exchange of tensors, the check after loading, imports."""

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kvq.kv_plugin import ENVIRONMENT, hooks, install
from kvq.kv_plugin.scale_file import PluginError, ScaleFile, read_scales
from tests.runs import fresh_environment

GOOD: dict[str, Any] = {
    "schema": "kvq.kv-scales/1", "dtype": "fp8_e4m3", "attention": "gqa", "num_layers": 2,
    "layers": {str(layer): {"k_scale": 0.5, "v_scale": 0.25, "variants": {}} for layer in range(3)},
}  # fmt: skip


def written(folder: Path, content: object) -> str:
    path = folder / "kv_cache_scales.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_the_file_is_read(tmp_path: Path) -> None:
    scales = read_scales(written(tmp_path, GOOD))
    assert (scales.attention, scales.num_layers) == ("gqa", 2)
    assert scales.layers == {layer: {"k_scale": 0.5, "v_scale": 0.25} for layer in range(3)}


@pytest.mark.parametrize(("change", "said"), [
    ({"schema": "kvq.kv-scales/2"}, "not a kvq.kv-scales/1 file"),
    ({"dtype": "fp8_e5m2"}, "for fp8_e4m3"),
    ({"attention": "dsa"}, "by itself"),
    ({"attention": "linear"}, "not what kvq writes"),
    ({"layers": {"0": {"k_scale": 1.0, "v_scale": 1.0}}}, "no scale of layer 1"),
    ({"layers": {"0": {"k_scale": 0, "v_scale": 1.0}}}, "k_scale of layer 0 is 0"),
    ({"layers": {"0": {"k_scale": -1.0, "v_scale": 1.0}}}, "not a positive number"),
    ({"layers": {"0": {"k_scale": float("nan"), "v_scale": 1.0}}}, "not a positive number"),
    ({"layers": {"0": {"k_scale": float("inf"), "v_scale": 1.0}}}, "not a positive number"),
    ({"layers": {"0": {"k_scale": 1.0}}}, "v_scale of layer 0 is None"),
    ({"layers": {"0": {"k_scale": True, "v_scale": 1.0}}}, "not a positive number"),
    ({"attention": "mla"}, "k_scale and v_scale differ"),
])  # fmt: skip
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        read_scales(written(tmp_path, {**GOOD, **change}))


def test_a_file_that_is_not_there_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "none.json"))
    with pytest.raises(SystemExit, match=r"cannot be read.*The engine was not started"):
        install()


def test_an_environment_without_sglang_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, written(tmp_path, GOOD))
    with pytest.raises(SystemExit, match="SGLang is not installed"):
        install()


def test_nothing_heavy_is_imported_before_the_file_is_asked_for() -> None:
    heavy = ("torch", "pydantic", "kvq.errors", "kvq.kv_plugin.hooks")
    code = f"import sys, kvq.kv_plugin as p; p.install(); print([m for m in {heavy} if m in sys.modules])"
    environment = {key: value for key, value in fresh_environment().items() if key != ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SCALES = ScaleFile("FILE", "gqa", 2, {layer: {"k_scale": 0.5, "v_scale": 0.25} for layer in range(2)})


def test_the_checkpoints_own_scales_give_way() -> None:
    weights = [("model.layers.0.self_attn.o_proj.weight", 1), ("model.layers.0.self_attn.attn.k_scale", 2),
               ("model.layers.0.self_attn.k_proj.weight_scale", 3)]  # fmt: skip
    given = list(hooks.exchange_scales(SCALES, weights))
    assert [name for name, _ in given[:2]] == [weights[0][0], weights[2][0]]
    assert {name: float(value) for name, value in given[2:]} == {
        f"model.layers.{layer}.self_attn.attn.{name}": value
        for layer in range(2) for name, value in (("k_scale", 0.5), ("v_scale", 0.25))
    }  # fmt: skip


def runner(scale: float = 0.5, **settings: object) -> Any:
    """What `ModelRunner.load_model` leaves, as far as the check looks."""
    layers = [types.SimpleNamespace(layer_id=i, k_scale_float=scale, v_scale_float=0.25) for i in range(2)]
    named = [(f"model.layers.{i}.self_attn.attn", layer) for i, layer in enumerate(layers)]
    args = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "triton", **settings}
    model = types.SimpleNamespace(named_modules=lambda: named)
    return types.SimpleNamespace(server_args=types.SimpleNamespace(**args), model=model, is_draft_worker=False)


def test_what_was_loaded_is_what_the_file_says() -> None:
    hooks.check_loaded(SCALES, runner())
    hooks.check_loaded(SCALES, runner(attention_backend=None))


@pytest.mark.parametrize(("wrong", "said"), [
    (runner(scale=1.0), "holds the scales"),
    (runner(kv_cache_dtype="auto"), "--kv-cache-dtype fp8_e4m3"),
    (runner(attention_backend="flashmla"), "--attention-backend flashmla"),
    (runner(decode_attention_backend="cutlass_mla"), "--decode-attention-backend cutlass_mla"),
])  # fmt: skip
def test_what_is_wrong_after_loading_is_refused(wrong: Any, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        hooks.check_loaded(SCALES, wrong)


def test_a_model_of_another_kind_is_refused() -> None:
    other = runner()
    other.model = types.SimpleNamespace(named_modules=lambda: [("model.layers.0.self_attn.attn_mqa", None)])
    with pytest.raises(RuntimeError, match="has no attention that FILE was made for"):
        hooks.check_loaded(SCALES, other)


def test_sparse_attention_is_refused_when_it_is_built() -> None:
    with pytest.raises(RuntimeError, match="sparse attention"):
        hooks._after_mla_attention(None, types.SimpleNamespace(use_dsa=True))

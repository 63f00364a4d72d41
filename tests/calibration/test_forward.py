"""ModelRunner equals transformers' own model; what it refuses.

Shape suffixes: N = sequences, S = tokens per sequence, H = hidden size.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq.calibration.forward import pick_device
from kvq.calibration.sparse_attention import SelectAll
from kvq.errors import CalibrationError, CheckpointError, RecipeError
from tests.calibration.models import (
    as_deepseek,
    assert_same,
    dequantized_copy,
    kvq_outputs,
    layer_with_experts,
    open_runner,
    random_tokens,
    transformers_outputs,
)
from tests.checkpoints import FAMILIES, TINY, Tiny, drop_tensor, edit_config, edit_tensor, make_checkpoint, preset

LONG = 40
MODELS = [
    ("glm_moe_dsa", preset("glm-5.2")),
    ("glm4_moe", TINY),
    ("glm4_moe", replace(TINY, n_group=2, topk_group=1)),
    ("deepseek_v3", TINY),
    ("deepseek_v3", preset("deepseek-v3")),
]


@pytest.mark.parametrize("length", [9, LONG])
@pytest.mark.parametrize(("family", "dims"), MODELS)
def test_equals_transformers(tmp_path: Path, family: str, dims: Tiny, length: int) -> None:
    folder = make_checkpoint(tmp_path / "source", family, "bf16", dims)
    tokens_NS = random_tokens(3, length)
    assert_same(kvq_outputs(folder, tokens_NS), transformers_outputs(folder, tokens_NS))


@pytest.mark.parametrize("length", [9, LONG])
def test_kimi_k2_equals_transformers_deepseek_v3(tmp_path: Path, length: int) -> None:
    folder = make_checkpoint(tmp_path / "source", "kimi_k2", "bf16")
    tokens_NS = random_tokens(2, length)
    expected = transformers_outputs(as_deepseek(folder, tmp_path / "renamed"), tokens_NS)
    assert_same(kvq_outputs(folder, tokens_NS), expected)


def test_kimi_k25_s_text_model_is_kimi_k2(tmp_path: Path) -> None:
    tokens_NS = random_tokens(2, 12)
    k2, k25 = (make_checkpoint(tmp_path / family, family, "bf16") for family in ("kimi_k2", "kimi_k25"))
    assert_same(kvq_outputs(k25, tokens_NS), kvq_outputs(k2, tokens_NS), atol=0)


def test_yarn_is_seen(tmp_path: Path) -> None:
    """The comparisons above would mean little if the rope scaling changed nothing."""
    folder = make_checkpoint(tmp_path / "source", "kimi_k2", "bf16")
    tokens_NS = random_tokens(1, LONG)
    with_yarn = kvq_outputs(folder, tokens_NS)
    edit_config(folder, lambda config: config.update(rope_scaling=None))
    change = (kvq_outputs(folder, tokens_NS).logits_NSV - with_yarn.logits_NSV).abs().max()
    assert change > 1e-2


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
def test_batches_do_not_change_the_result(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "source", family, "bf16")
    tokens_NS = random_tokens(5, LONG)
    assert_same(kvq_outputs(folder, tokens_NS, batch_size=2), kvq_outputs(folder, tokens_NS, batch_size=5), atol=1e-5)


# Sparse attention.


@pytest.mark.parametrize("length", [5, 16])
def test_select_all_equals_the_indexer_for_short_sequences(tmp_path: Path, length: int) -> None:
    runner = open_runner(make_checkpoint(tmp_path / "source", "glm_moe_dsa", "bf16"))
    hidden_NSH = runner.embed(random_tokens(3, length)).hidden_NSH
    module = layer_with_experts(runner, 1)
    outputs = []
    for indexer in (module.self_attn.indexer, SelectAll(module.self_attn.indexer)):
        module.self_attn.indexer = indexer
        with torch.no_grad():
            output_NSH, topk_NSK = module(
                hidden_NSH,
                attention_mask=torch.ones(length, length, dtype=torch.bool).tril()[None, None],
                position_embeddings=runner.rotary(hidden_NSH, torch.arange(length)[None]),
            )
        assert topk_NSK.shape == (3, length, length)
        outputs.append(output_NSH)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("length", "replaced"), [(16, True), (17, False)])
def test_the_indexer_runs_only_when_it_has_a_choice(tmp_path: Path, length: int, replaced: bool) -> None:
    runner = open_runner(make_checkpoint(tmp_path / "source", "glm_moe_dsa", "bf16"))
    module = layer_with_experts(runner, 0)
    runner.run(module, 0, runner.embed(random_tokens(2, length)))
    assert isinstance(module.self_attn.indexer, SelectAll) is replaced


def test_a_shared_layer_gets_the_last_full_layer_s_selection(tmp_path: Path) -> None:
    runner = open_runner(make_checkpoint(tmp_path / "source", "glm_moe_dsa", "bf16", preset("glm-5.2")))
    assert runner.config.indexer_types[:4] == ["full", "full", "shared", "full"]
    store = runner.embed(random_tokens(3, LONG))
    store.batch_size = 2
    selections = []
    for layer in range(3):
        module = layer_with_experts(runner, layer)
        given: list[Tensor] = []
        module.register_forward_pre_hook(
            lambda _m, _a, kwargs, given=given: given.append(kwargs["prev_topk_indices"]), with_kwargs=True
        )
        runner.run(module, layer, store)
        selections.append((torch.cat(given), store.read_topk(slice(0, 3), torch.device("cpu"), 16).clone()))
    assert torch.equal(selections[2][0], selections[1][1])
    assert not torch.equal(selections[1][1], selections[0][1])
    assert torch.equal(selections[2][1], selections[1][1])


# FP8 sources.


@pytest.mark.parametrize("family", FAMILIES[:3])
@pytest.mark.parametrize("source", ["fp8_block", "fp8_channel"])
def test_fp8_sources_equal_their_dequantized_weights(tmp_path: Path, source: str, family: str) -> None:
    block = (48, 40)
    folder = make_checkpoint(tmp_path / "source", family, source, block_size=block)
    plain = dequantized_copy(folder, tmp_path / "plain", block)
    tokens_NS = random_tokens(2, 20)
    found = kvq_outputs(folder, tokens_NS)
    assert_same(found, kvq_outputs(plain, tokens_NS), atol=0)
    assert_same(found, transformers_outputs(plain, tokens_NS))


# What it refuses.


@pytest.mark.parametrize(
    "name", ["self_attn.o_proj.weight", "mlp.gate.e_score_correction_bias", "input_layernorm.weight"]
)
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path / "source", "deepseek_v3", "bf16")
    drop_tensor(folder, f"model.layers.1.{name}")
    with pytest.raises(CheckpointError, match=f"no tensor model.layers.1.{name}"):
        layer_with_experts(open_runner(folder), 1)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "source", "deepseek_v3", "bf16")
    drop_tensor(folder, "model.layers.2.mlp.experts.5.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight"):
        layer_with_experts(open_runner(folder), 2)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize(("layer", "name"), [(0, "mlp.down_proj.weight"), (2, "mlp.shared_experts.down_proj.weight")])
def test_activations_that_are_not_finite_name_the_layer(tmp_path: Path, family: str, layer: int, name: str) -> None:
    folder = make_checkpoint(tmp_path / "source", family, "bf16")
    edit_tensor(folder, f"model.layers.{layer}.{name}", lambda tensor: torch.full_like(tensor, 3e38))
    with pytest.raises(CalibrationError, match=f"layer {layer} gives NaN or Inf for sequences 0 to 1"):
        kvq_outputs(folder, random_tokens(3, 10))


@pytest.mark.parametrize("name", ["tpu", "mps", "cuda:99", "cpu:x", ""])
def test_devices_that_are_not_there_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="--device"):
        pick_device(name)


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda")


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "source", "glm4_moe", "bf16")
    drop_tensor(folder, "lm_head.weight")
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
        open_runner(folder).lm_head()
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    runner = open_runner(folder)
    assert torch.equal(runner.lm_head(), runner.weight("model.embed_tokens.weight"))

"""The plan: what happens to every tensor, and every refusal that needs no weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvq.checkpoint.architecture import model_facts
from kvq.checkpoint.packing import pack_int4
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CheckpointError, KvqError, RecipeError
from kvq.recipes.plan import REASONS, QuantPlan, resolve_plan, tensor_class
from kvq.recipes.schema import load_recipe, override
from tests.checkpoints import (
    FAMILIES,
    drop_tensor,
    edit_config,
    edit_tensor,
    make_checkpoint,
    preset,
    read_tensors,
    rewrite_index,
)

EXPERT = "model.layers.2.mlp.experts.5.down_proj"
NUM_MODULES = 3 * 8 * 3  # layers 1 and 2 and the MTP layer 3, experts, projections
PACKED_BYTES = 64 * 64 // 2 + 64 * 2 * 2 + 2 * 8  # words, two BF16 scales a row, the shape


def plan_of(folder: Path, *settings: str, recipe: str = "int4-g32") -> QuantPlan:
    reader = CheckpointReader(folder)
    return resolve_plan(override(load_recipe(recipe), settings), reader.config, reader.index)


def refused(folder: Path, *settings: str, error: type[KvqError] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        plan_of(folder, *settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def of_class(plan: QuantPlan, kind: str) -> set[str]:
    return {tensor.action for tensor in plan.tensors.values() if tensor.tensor_class == kind}


# What is planned.


def test_an_expert_becomes_three_tensors(tmp_path: Path) -> None:
    plan = plan_of(make_checkpoint(tmp_path, "glm_moe_dsa"))
    parts = {
        name.removeprefix(EXPERT + "."): (part.dtype, part.shape, part.action, part.tensor_class, part.sources)
        for name, part in plan.tensors.items()
        if name.startswith(EXPERT + ".")
    }
    rest = ("pack", "routed experts", (f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv"))
    assert parts == {
        "weight_packed": ("I32", (64, 8), *rest),
        "weight_scale": ("BF16", (64, 2), *rest),
        "weight_shape": ("I64", (2,), *rest),
    }
    packed = pack_int4(torch.zeros(64, 64, dtype=torch.int8))
    assert packed.shape == (64, 8) and packed.nbytes == plan.tensors[f"{EXPERT}.weight_packed"].nbytes


@pytest.mark.parametrize(("setting", "groups"), [("group_size=32", 2), ("group_size=64", 1)])
def test_group_size_sets_the_scales(tmp_path: Path, setting: str, groups: int) -> None:
    plan = plan_of(make_checkpoint(tmp_path, "kimi_k2"), setting)
    assert plan.tensors[f"{EXPERT}.weight_scale"].shape == (64, groups)


@pytest.mark.parametrize(
    ("source", "expert_bytes", "change_of_wk"),
    [("fp8_block", 64 * 64 + 4, 1024 - 4), ("fp8_channel", 64 * 64 + 64 * 2, 1024 - 16 * 2), ("bf16", 64 * 64 * 2, 0)],
)
def test_bytes_of_the_output(tmp_path: Path, source: str, expert_bytes: int, change_of_wk: int) -> None:
    folder = make_checkpoint(tmp_path, "glm_moe_dsa", source)
    plan = plan_of(folder)
    stored = sum(tensor.nbytes for tensor in read_tensors(folder).values())
    assert plan.source_bytes == stored and plan.num_modules == NUM_MODULES
    num_wk = 3  # layers 0 and 1 and the MTP layer; layer 2 shares
    assert plan.output_bytes == stored + NUM_MODULES * (PACKED_BYTES - expert_bytes) + num_wk * change_of_wk


@pytest.mark.parametrize("source", ["fp8_block", "fp8_channel", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rest", ["keep", "bf16"])
def test_no_tensor_of_the_source_is_lost(tmp_path: Path, family: str, source: str, rest: str) -> None:
    folder = make_checkpoint(tmp_path, family, source)
    plan = plan_of(folder, f"rest={rest}")
    assert {name for tensor in plan.tensors.values() for name in tensor.sources} == set(read_tensors(folder))
    assert all(name == tensor.name for name, tensor in plan.tensors.items())
    assert {tensor.tensor_class for tensor in plan.tensors.values()} <= set(REASONS) - {"other"}


@pytest.mark.parametrize("family", FAMILIES)
def test_only_routed_experts_are_quantized(tmp_path: Path, family: str) -> None:
    plan = plan_of(make_checkpoint(tmp_path, family))
    packed = {name for name, tensor in plan.tensors.items() if tensor.action == "pack"}
    assert packed == {name for name in plan.tensors if ".mlp.experts." in name}
    assert of_class(plan, "routed experts") == {"pack"}


def test_scales_are_renamed_and_keep_their_bytes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    plan, name = plan_of(folder), "model.layers.1.self_attn.o_proj.weight_scale"
    assert [name for name in plan.tensors if "scale_inv" in name] == []
    scale = plan.tensors[name]
    assert (scale.action, scale.dtype, scale.sources) == ("keep", "F32", (f"{name}_inv",))
    weight = plan.tensors[name.removesuffix("_scale")]
    assert (weight.action, weight.dtype) == ("keep", "F8_E4M3")


@pytest.mark.parametrize(("source", "suffix"), [("fp8_block", "weight_scale_inv"), ("fp8_channel", "weight_scale")])
def test_wk_of_the_indexer_is_dequantized(tmp_path: Path, source: str, suffix: str) -> None:
    plan, module = plan_of(make_checkpoint(tmp_path, "glm_moe_dsa", source)), "model.layers.1.self_attn.indexer.wk"
    weight = plan.tensors[f"{module}.weight"]
    assert (weight.action, weight.dtype, weight.shape) == ("dequantize", "BF16", (16, 64))
    assert weight.sources == (f"{module}.weight", f"{module}.{suffix}")
    assert f"{module}.weight_scale" not in plan.tensors
    dequantized = [name for name, tensor in plan.tensors.items() if tensor.action == "dequantize"]
    assert dequantized == [f"model.layers.{layer}.self_attn.indexer.wk.weight" for layer in (0, 1, 3)]


@pytest.mark.parametrize("source", ["fp8_block", "fp8_channel"])
def test_layout_c_has_no_fp8(tmp_path: Path, source: str) -> None:
    folder = make_checkpoint(tmp_path, "glm_moe_dsa", source)
    plan, kept = plan_of(folder, "rest=bf16"), plan_of(folder)
    assert {tensor.dtype for tensor in plan.tensors.values()} == {"I32", "I64", "BF16", "F32"}
    assert [name for name in plan.tensors if "_scale" in name and ".experts." not in name] == []
    fp8 = {name for name, tensor in kept.tensors.items() if tensor.dtype == "F8_E4M3"}
    assert fp8 and all(plan.tensors[name].action == "dequantize" for name in fp8)
    assert all(len(plan.tensors[name].sources) == 2 for name in fp8)
    plain = plan_of(make_checkpoint(tmp_path / "bf16", "glm_moe_dsa", "bf16"))
    assert plan.output_bytes == plain.output_bytes and set(plan.tensors) == set(plain.tensors)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "glm4_moe"])
def test_mtp_layer_is_planned_like_the_others(tmp_path: Path, family: str) -> None:
    plan = plan_of(make_checkpoint(tmp_path, family))
    mtp = {name: tensor for name, tensor in plan.tensors.items() if name.startswith("model.layers.3.")}
    assert sum(name.endswith(".weight_packed") for name in mtp) == 8 * 3
    assert mtp["model.layers.3.eh_proj.weight"].action == "keep"
    assert mtp["model.layers.3.eh_proj.weight"].tensor_class == "MTP"
    assert mtp["model.layers.3.enorm.weight"].tensor_class == "norms"
    own = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert own & set(mtp) == (own if family == "glm4_moe" else set())
    assert list(plan.facts.mtp_layers) == [3]


def test_one_shard_per_layer_and_one_for_the_rest(tmp_path: Path) -> None:
    plan = plan_of(make_checkpoint(tmp_path, "glm4_moe", shards=7))
    shards = plan.shard_tensors()
    assert list(shards) == [f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)]
    layers = [{plan.facts.layer_of(tensor.name) for tensor in tensors} for tensors in shards.values()]
    assert layers == [{None}, {0}, {1}, {2}, {3}]
    assert sum(map(len, shards.values())) == len(plan.tensors)


def test_a_plan_is_the_same_whatever_the_shards_are(tmp_path: Path) -> None:
    one = plan_of(make_checkpoint(tmp_path / "one", "glm_moe_dsa", single_file=True))
    many = plan_of(make_checkpoint(tmp_path / "many", "glm_moe_dsa", shards=5))
    assert one == many


def test_prefix_and_vision_tower(tmp_path: Path) -> None:
    plan = plan_of(make_checkpoint(tmp_path, "kimi_k25"))
    assert plan.tensors[f"language_model.{EXPERT}.weight_packed"].action == "pack"
    vision = [name for name in plan.tensors if not name.startswith("language_model.")]
    assert len(vision) == 23 and of_class(plan, "vision") == {"keep"}
    assert {plan.tensors[name].tensor_class for name in vision} == {"vision"}


def test_int4_source_passes_through(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k25", "int4")
    plan, stored = plan_of(folder), CheckpointReader(folder).index
    assert plan.pass_through and plan.quantization_config is None and plan.num_modules == 0
    assert plan.output_bytes == plan.source_bytes == stored.total_bytes
    assert {name: (t.dtype, t.shape, t.shard, t.action, t.sources) for name, t in plan.tensors.items()} == {
        name: (info.dtype, info.shape, info.shard, "keep", (name,)) for name, info in stored.tensors.items()
    }
    assert plan.warnings[-1] == "the source is INT4 in groups of 32 already: all tensors pass through byte for byte"


def test_int4_source_takes_any_group_size(tmp_path: Path) -> None:
    assert plan_of(make_checkpoint(tmp_path, "kimi_k2", "int4"), "group_size=128").pass_through


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.1.mlp.experts.0.up_proj.weight", "routed experts"),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", "shared experts"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "dense MLP"),
        ("model.layers.1.self_attn.indexer.k_norm.weight", "indexer"),
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "attention"),
        ("model.layers.1.self_attn.q_proj.bias", "attention"),
        ("model.layers.1.self_attn.q_norm.weight", "norms"),
        ("model.layers.1.post_attention_layernorm.weight", "norms"),
        ("model.layers.3.shared_head.norm.weight", "norms"),
        ("model.layers.3.shared_head.head.weight", "MTP"),
        ("model.embed_tokens.weight", "embeddings"),
        ("model.norm.weight", "norms"),
        ("lm_head.weight", "lm_head"),
        ("mm_projector.proj.0.weight", "vision"),
        ("model.rotary.inv_freq", "other"),
        ("model.layers.1.mystery", "other"),
    ],
)
def test_tensor_classes(tmp_path: Path, name: str, kind: str) -> None:
    config = CheckpointReader(make_checkpoint(tmp_path, "glm_moe_dsa", "bf16")).config
    assert tensor_class(name, model_facts(config, tmp_path)) == kind


# Warnings.


def test_dead_entry_of_the_ignore_list_is_told(tmp_path: Path) -> None:
    (warning,) = plan_of(make_checkpoint(tmp_path, "glm_moe_dsa")).warnings
    assert "ignores 'model.layers.0.self_attn.indexers_proj', but no module has that name" in warning


def test_living_entries_are_not(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm4_moe", "fp8_channel")
    living = ["lm_head", "gate", "mlp.gate", "model.layers.2", r"re:.*\.mlp\.gate$", "re:model.*eh_proj"]
    dead = ["mlp.gat", r"re:.*\.router$", "model.layers.4"]
    edit_config(folder, lambda config: config["quantization_config"].update(ignore=[*living, *dead]))
    expected = [f"the source's config ignores {entry!r}, but no module has that name" for entry in dead]
    assert list(plan_of(folder).warnings) == expected


def test_warnings_of_the_index_are_passed_on(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    rewrite_index(folder, lambda index: index["weight_map"].pop("lm_head.weight"))
    (warning,) = plan_of(folder).warnings
    assert "lm_head.weight; taken in" in warning


# Refusals.


def test_no_group_size_fits(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm4_moe", dims=preset("glm-4.5-air"))
    message = refused(folder, "group_size=128", error=RecipeError)
    assert "group_size 128 does not divide the experts' columns (hidden_size 64, moe_intermediate_size 88)" in message
    assert message.endswith("sizes that fit: none; no group size that kvq writes fits.")


def test_group_sizes_that_fit_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm4_moe", dims=preset("glm-4.7"))
    message = refused(folder, "group_size=64", error=RecipeError)
    assert "sizes that fit: [32]; use --set group_size=32" in message
    both = make_checkpoint(tmp_path / "both", "glm4_moe")
    message = refused(both, "group_size=128", error=RecipeError)
    assert "sizes that fit: [32, 64]; use --set group_size=64" in message


def test_layers_beyond_the_config(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm_moe_dsa")
    edit_config(folder, lambda config: config.update(num_nextn_predict_layers=0))
    assert "there are tensors of layer 3, but config.json counts 3 layers and 0 MTP layers" in refused(folder)


@pytest.mark.parametrize("family", ["glm4_moe", "kimi_k25"])
def test_missing_expert_is_named(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family)
    name = f"{'language_model.' if family == 'kimi_k25' else ''}{EXPERT}.weight"
    drop_tensor(folder, name)
    assert f"the checkpoint has no tensor {name}" in refused(folder)


def test_config_with_more_experts_than_there_are(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    edit_config(folder, lambda config: config.update(n_routed_experts=9))
    assert "no tensor model.layers.1.mlp.experts.8.gate_proj.weight" in refused(folder)


@pytest.mark.parametrize(
    "change", [{"n_routed_experts": 7}, {"first_k_dense_replace": 2}], ids=["expert 7", "experts of layer 1"]
)
def test_config_with_fewer_experts_than_there_are(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    edit_config(folder, lambda config: config.update(change))
    message = refused(folder)
    assert "there is a tensor model.layers.1.mlp.experts." in message and "Is config.json from another" in message


def test_expert_of_another_shape(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2", "bf16")
    edit_tensor(folder, f"{EXPERT}.weight", lambda tensor: tensor[:, :32])
    assert f"{EXPERT}.weight is [64, 32], the config says [64, 64]" in refused(folder)


@pytest.mark.parametrize("tensor", ["model.embed_tokens.weight", "model.norm.weight"])
def test_missing_end_of_the_model(tmp_path: Path, tensor: str) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    drop_tensor(folder, tensor)
    assert f"the checkpoint has no tensor {tensor}" in refused(folder)


def test_missing_dense_layer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    for name in [name for name in read_tensors(folder) if name.startswith("model.layers.0.")]:
        drop_tensor(folder, name)
    assert "there is no tensor of layer 0" in refused(folder)


def drop_scale(folder: Path, module: str) -> None:
    drop_tensor(folder, f"{module}.weight_scale_inv")


def cut_scale(folder: Path, module: str) -> None:
    edit_tensor(folder, f"{module}.weight_scale_inv", lambda scale: scale.reshape(-1))


def make_bf16(folder: Path, module: str) -> None:
    edit_tensor(folder, f"{module}.weight", lambda weight: weight.to(torch.bfloat16))


@pytest.mark.parametrize("module", [EXPERT, "model.layers.1.self_attn.o_proj"])
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (drop_scale, "has no scale"),
        (cut_scale, "is F32 [1], expected a float tensor [1, 1]"),
        (make_bf16, "is a scale, but its weight is not FP8"),
    ],
)
def test_weights_and_scales_that_do_not_fit(
    tmp_path: Path, damage: Callable[[Path, str], None], expected: str, module: str
) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    damage(folder, module)
    message = refused(folder)
    assert expected in message and f"{module}.weight" in message


def test_unexpected_tensor_of_an_expert(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2", "bf16")
    save_file({f"{EXPERT}.bias": torch.zeros(64)}, folder / "extra.safetensors")
    assert f"unexpected tensor {EXPERT}.bias" in refused(folder)


def test_unknown_model_and_format_are_refused_at_plan_time(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    edit_config(folder, lambda config: config["quantization_config"].update(quant_method="mxfp4"))
    assert "quant_method 'mxfp4' is not supported" in refused(folder)
    edit_config(folder, lambda config: config.update(model_type="llama"))
    assert "model_type 'llama' is not supported" in refused(folder)

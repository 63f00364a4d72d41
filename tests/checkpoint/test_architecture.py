"""Architecture rows against the tensors that checkpoints of that family hold."""

from pathlib import Path
from typing import Any

import pytest

from kvq.checkpoint.architecture import ARCHITECTURES, MLA_KEYS, MOE_KEYS, PROJECTIONS, ModelFacts, model_facts
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CheckpointError
from tests.checkpoints import FAMILIES, GLM, TINY, Tiny, make_checkpoint

WIDE = Tiny(hidden_size=96, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2)


def tiny_config(**changes: Any) -> dict[str, Any]:
    values = dict.fromkeys((*MOE_KEYS, *MLA_KEYS), 8)
    return {"model_type": "kimi_k2", **values, "num_hidden_layers": 3, "first_k_dense_replace": 1, **changes}


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        model_facts(config, Path("folder"))
    assert "config.json" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_name_the_tensors_of_every_family(tmp_path: Path, family: str) -> None:
    reader = CheckpointReader(make_checkpoint(tmp_path, family, "bf16", WIDE))
    facts = model_facts(reader.config, reader.folder)
    mtp = 1 if family in GLM else 0
    assert (facts.num_layers, facts.num_mtp_layers, facts.num_experts) == (3, mtp, 4)
    assert list(facts.mtp_layers) == [3][:mtp] and list(facts.moe_layers) == [1, 2, 3][: 2 + mtp]
    named = {
        f"{facts.expert_module(layer, expert, projection)}.weight": facts.expert_shape(projection)
        for layer in facts.moe_layers
        for expert in range(facts.num_experts)
        for projection in PROJECTIONS
    }
    stored = {name: info.shape for name, info in reader.index.tensors.items() if ".mlp.experts." in name}
    assert named == stored


def test_every_family_is_a_row() -> None:
    assert set(ARCHITECTURES) == set(FAMILIES)
    assert all(row.model_type == model_type for model_type, row in ARCHITECTURES.items())


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.0.mlp.gate.weight", 0),
        ("model.layers.61.eh_proj.weight", 61),
        ("model.layers.7", None),
        ("model.layers.x.mlp.weight", None),
        ("model.norm.weight", None),
        ("vision_tower.model.layers.1.weight", None),
    ],
)
def test_layer_of(name: str, layer: int | None) -> None:
    assert model_facts(tiny_config(), Path("folder")).layer_of(name) == layer


def test_prefix_is_part_of_every_name() -> None:
    facts = model_facts({"model_type": "kimi_k25", "text_config": tiny_config()}, Path("folder"))
    assert facts.layer_prefix(3) == "language_model.model.layers.3."
    assert facts.expert_module(3, 17, "down_proj") == "language_model.model.layers.3.mlp.experts.17.down_proj"
    assert facts.layer_of("language_model.model.layers.3.x") == 3
    assert facts.layer_of("model.layers.3.x") is None


def test_kimi_runs_as_deepseek_without_remote_code() -> None:
    for model_type in ("kimi_k2", "kimi_k25"):
        assert ARCHITECTURES[model_type].transformers_type == "deepseek_v3"


@pytest.mark.parametrize("model_type", ["llama", "Glm4Moe", None, ["kimi_k2"], 3])
def test_unknown_model_type_names_the_known_ones(model_type: Any) -> None:
    message = refused(tiny_config(model_type=model_type))
    assert f"model_type {model_type!r} is not supported" in message
    assert all(known in message for known in FAMILIES)


@pytest.mark.parametrize("key", [*MOE_KEYS, *MLA_KEYS])
def test_missing_key_is_named(key: str) -> None:
    config = tiny_config()
    del config[key]
    assert f"needs the number {key!r}, which is absent" in refused(config)
    assert f"{key} is '8', expected a" in refused(tiny_config(**{key: "8"}))


@pytest.mark.parametrize("text", [None, [], "x"])
def test_kimi_k25_needs_its_text_config(text: Any) -> None:
    assert "has no 'text_config' object" in refused({**tiny_config(), "model_type": "kimi_k25", "text_config": text})


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_routed_experts", "hidden_size", "num_nextn_predict_layers"])
@pytest.mark.parametrize("value", [2.5, -1, float("inf"), True])
def test_counts_are_whole_numbers(key: str, value: Any) -> None:
    assert f"{key} is {value!r}, expected a whole number" in refused(tiny_config(**{key: value}))


@pytest.mark.parametrize(
    "change",
    [
        {"first_k_dense_replace": 3},
        {"moe_layer_freq": 2},
        {"moe_layer_freq": [0, 1, 1]},
    ],
)
def test_senseless_layouts_are_refused(change: dict[str, Any]) -> None:
    assert "kvq expects routed experts in every layer after the first dense ones" in refused(tiny_config(**change))


@pytest.mark.parametrize("key", ["n_routed_experts", "hidden_size", "num_attention_heads", "kv_lora_rank"])
def test_counts_of_nothing_are_refused(key: str) -> None:
    assert f"{key} is 0, which no model has" in refused(tiny_config(**{key: 0}))


@pytest.mark.parametrize("value", [0, None])
def test_no_mtp_layers(value: Any) -> None:
    facts = model_facts(tiny_config(num_nextn_predict_layers=value), Path("folder"))
    assert list(facts.mtp_layers) == [] and list(facts.moe_layers) == [1, 2]


def test_all_layers_may_have_experts() -> None:
    facts: ModelFacts = model_facts(tiny_config(first_k_dense_replace=0), Path("folder"))
    assert list(facts.moe_layers) == [0, 1, 2] and TINY.num_hidden_layers == facts.num_layers

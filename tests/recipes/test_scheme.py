"""quantization_config as engines read it: pinned, key for key."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig

from kvq.checkpoint.formats import SourceFormat
from kvq.checkpoint.reader import CheckpointReader
from kvq.recipes.plan import resolve_plan
from kvq.recipes.schema import load_recipe, override
from kvq.recipes.scheme import EXPERTS_TARGET, output_config, quantization_config
from tests.checkpoints import drop_tensor, edit_tensor, make_checkpoint

INT4_GROUP_32 = {
    "targets": [r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"],
    "format": "pack-quantized",
    "weights": {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "actorder": None,
    },
    "input_activations": None,
    "output_activations": None,
}
BLOCK_GROUP = {
    "targets": ["Linear"],
    "format": "float-quantized",
    "weights": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "block",
        "block_structure": [128, 128],
        "dynamic": False,
    },
    "input_activations": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": 128,
        "dynamic": True,
    },
    "output_activations": None,
}
CHANNEL_GROUP = {
    "targets": ["Linear"],
    "format": "float-quantized",
    "weights": {
        "num_bits": 8,
        "type": "float",
        "strategy": "channel",
        "group_size": None,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "actorder": None,
    },
    "input_activations": {
        "num_bits": 8,
        "type": "float",
        "strategy": "token",
        "dynamic": True,
        "symmetric": True,
    },
    "output_activations": None,
}
GOLDEN: dict[tuple[str, str], dict[str, Any]] = {
    ("glm_moe_dsa", "fp8_block"): {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": INT4_GROUP_32, "group_1": BLOCK_GROUP},
        "ignore": [
            "lm_head",
            r"re:.*indexer\.(wk|weights_proj|wk_weights_proj)$",
            r"re:.*\.mlp\.gate$",
            r"re:.*\.eh_proj$",
        ],
        "kv_cache_scheme": None,
    },
    ("glm4_moe", "fp8_channel"): {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": INT4_GROUP_32, "group_1": CHANNEL_GROUP},
        "ignore": ["lm_head", r"re:.*\.mlp\.gate$", r"re:.*\.eh_proj$", r"re:.*\.shared_head\.head$"],
        "kv_cache_scheme": None,
    },
    ("glm_moe_dsa", "bf16"): {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": INT4_GROUP_32},
        "ignore": [
            "lm_head",
            r"re:.*\.self_attn\..*",
            r"re:.*\.mlp\.shared_experts\..*",
            r"re:.*\.mlp\.(gate|up|gate_up|down)_proj$",
            r"re:.*\.mlp\.gate$",
            r"re:.*\.eh_proj$",
        ],
        "kv_cache_scheme": None,
    },
}


def described(folder: Path, *settings: str) -> Any:
    reader = CheckpointReader(folder)
    return resolve_plan(override(load_recipe("int4-g32"), settings), reader.config, reader.index).quantization_config


@pytest.mark.parametrize(("family", "source"), GOLDEN)
def test_golden_quantization_config(tmp_path: Path, family: str, source: str) -> None:
    found = described(make_checkpoint(tmp_path, family, source))
    assert found == GOLDEN[family, source]
    # transformers takes the first group whose pattern names experts
    assert list(found["config_groups"]) == list(GOLDEN[family, source]["config_groups"])


@pytest.mark.parametrize(("family", "source"), GOLDEN)
def test_compressed_tensors_reads_it(tmp_path: Path, family: str, source: str) -> None:
    found = QuantizationConfig.model_validate(described(make_checkpoint(tmp_path, family, source)))
    assert found.format == "pack-quantized" and found.config_groups["group_0"].weights.group_size == 32


@pytest.mark.parametrize("source", ["fp8_block", "fp8_channel"])
def test_layout_c_describes_the_experts_alone(tmp_path: Path, source: str) -> None:
    found = described(make_checkpoint(tmp_path, "glm_moe_dsa", source), "rest=bf16", "group_size=64")
    assert list(found["config_groups"]) == ["group_0"]
    assert found["ignore"] == GOLDEN["glm_moe_dsa", "bf16"]["ignore"]
    assert found["config_groups"]["group_0"]["weights"]["group_size"] == 64


def test_block_size_of_the_source_is_told(tmp_path: Path) -> None:
    group = described(make_checkpoint(tmp_path, "kimi_k2", block_size=(32, 64)))["config_groups"]["group_1"]
    assert group["weights"]["block_structure"] == [32, 64] and group["input_activations"]["group_size"] == 64


def test_bf16_module_that_no_pattern_matches_is_named(tmp_path: Path) -> None:
    folder, module = make_checkpoint(tmp_path, "kimi_k2"), "model.layers.1.self_attn.o_proj"
    edit_tensor(folder, f"{module}.weight", lambda tensor: tensor.to(torch.bfloat16))
    drop_tensor(folder, f"{module}.weight_scale_inv")
    assert described(folder)["ignore"] == ["lm_head", r"re:.*\.mlp\.gate$", module]


@pytest.mark.parametrize(
    ("names", "ignore"),
    [
        ([], []),
        (["language_model.lm_head"], ["lm_head"]),
        (["model.layers.3.mlp.gate"], [r"re:.*\.mlp\.gate$"]),
        (["a.indexer.wk"], [r"re:.*indexer\.(wk|weights_proj|wk_weights_proj)$"]),
        (["a.not_lm_head", "a.gate"], ["a.gate", "a.not_lm_head"]),
    ],
)
def test_no_entry_of_the_ignore_list_is_dead(names: list[str], ignore: list[str]) -> None:
    source = SourceFormat("fp8-block", "FP8", "weight_scale_inv", (128, 128))
    assert quantization_config(load_recipe("int4"), source, names)["ignore"] == ignore


def test_experts_target_is_the_literal_that_engines_match() -> None:
    assert INT4_GROUP_32["targets"] == [EXPERTS_TARGET]


def test_output_config_replaces_only_the_quantization() -> None:
    config = {"a": 1, "quantization_config": {"quant_method": "fp8"}, "b": {"c": 2}}
    found = output_config(config, {"quant_method": "x"}, None)
    assert found == {"a": 1, "b": {"c": 2}, "quantization_config": {"quant_method": "x"}}
    assert config["quantization_config"] == {"quant_method": "fp8"}


def test_output_config_leaves_no_second_one_in_text_config() -> None:
    config = {"text_config": {"z": 1, "quantization_config": {"quant_method": "fp8"}, "a": 2}, "vision_config": {}}
    found = output_config(config, {"quant_method": "x"}, "text_config")
    assert found["text_config"] == {"z": 1, "a": 2} and list(found["text_config"]) == ["z", "a"]
    assert found["quantization_config"] == {"quant_method": "x"} and found["vision_config"] == {}
    assert "quantization_config" in config["text_config"]

"""The tokenizer and its chat template, configs, and modules, as transformers gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq.calibration.dataset import load_packed
from kvq.calibration.forward import ModelRunner
from kvq.calibration.tokenizer_process import TokenizerProcess
from kvq.calibration.transformers_door import load_tokenizer
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CalibrationError, CheckpointError
from tests.checkpoints import FAMILIES, TINY, edit_config, make_checkpoint, mtp_layers, preset

HELLO = [{"role": "user", "content": "hello hello hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "source", "glm4_moe", "bf16")


def encode(folder: Path, row: dict[str, Any]) -> int:
    file = folder.parent / "rows.jsonl"
    file.write_text(json.dumps(row))
    return load_packed(folder, TINY.vocab_size, file, 1, 64).num_tokens


# Tokenizer and template.


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizers_load_without_running_the_folder_s_code(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / family, family, "bf16")
    assert encode(folder, {"messages": HELLO}) > encode(folder, {"text": HELLO[0]["content"]}) > 8


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('users come first') }}", "users come first"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ [].pop() }}", "SecurityError|IndexError"),
    ],
)
def test_templates_that_fail_are_named_by_row_and_reason(folder: Path, template: str, reason: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CalibrationError, match=rf"rows\.jsonl:1: the model's chat template cannot.*({reason})"):
        encode(folder, {"messages": HELLO})
    assert encode(folder, {"text": "hello hello hello"}) > 8


def test_folder_without_a_template_takes_text_only(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CalibrationError, match=r"rows\.jsonl:1: the model's chat template cannot"):
        encode(folder, {"messages": HELLO})
    assert encode(folder, {"text": "hello hello hello"}) > 8


@pytest.mark.parametrize(
    "row",
    [
        {"messages": []},
        {"messages": HELLO, "tools": ["add"]},
        {"messages": [{"role": "assistant", "tool_calls": 3}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    ],
)
def test_messages_that_the_template_cannot_render_are_refused(folder: Path, row: dict[str, Any]) -> None:
    with pytest.raises(CalibrationError, match=r"rows\.jsonl:1: the model's chat template cannot"):
        encode(folder, row)


@pytest.mark.parametrize("content", [None, "nonsense", "{}"])
def test_tokenizers_that_cannot_be_loaded_name_the_folder(folder: Path, content: str | None) -> None:
    file = folder / "tokenizer.json"
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    with pytest.raises(CalibrationError, match=r"source: the tokenizer cannot be loaded.*input_ids"):
        load_tokenizer(folder)


def test_what_tokenizers_print_is_not_on_stdout(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """stdout is for kvq's results: `--json` promises one JSON object there and nothing else."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][0]["of_no_meaning"] = 3
    (folder / "tokenizer.json").write_text(json.dumps(content))
    TokenizerProcess(folder)
    said = capfd.readouterr()
    assert said.out == "" and "of_no_meaning" in said.err


# Config and modules.


def runner(folder: Path) -> ModelRunner:
    return ModelRunner(CheckpointReader(folder), torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_has_its_module_on_meta(tmp_path: Path, family: str) -> None:
    from kvq.calibration.transformers_door import build_layer

    opened = runner(make_checkpoint(tmp_path / family, family, "bf16"))
    for layer in [*range(TINY.num_hidden_layers), *mtp_layers(family)]:
        module = build_layer(opened.facts.arch, opened.config, layer)
        assert all(parameter.is_meta for parameter in module.parameters())
        assert all(value.is_meta for value in module.state_dict().values())
        assert hasattr(module.mlp, "experts") is (layer in opened.facts.moe_layers)
        assert not module.training


def test_per_layer_lists_go_on_over_the_mtp_layers(tmp_path: Path) -> None:
    opened = runner(make_checkpoint(tmp_path / "source", "glm_moe_dsa", "bf16", preset("glm-5.2")))
    assert opened.config.indexer_types == ["full", "full", "shared", "full", "full"]


def test_float32_parameters_stay_float32(tmp_path: Path) -> None:
    opened = runner(make_checkpoint(tmp_path / "source", "glm_moe_dsa", "bf16"))
    opened.dtype = torch.bfloat16
    kept = {
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.float32,
        "model.layers.1.self_attn.indexer.weights_proj.weight": torch.float32,
        "model.layers.1.self_attn.o_proj.weight": torch.bfloat16,
        "model.layers.1.mlp.experts.0.up_proj.weight": torch.bfloat16,
    }
    assert {name: opened.weight(name).dtype for name in kept} == kept


@pytest.mark.parametrize("source", ["fp8_block", "fp8_channel", "int4"])
def test_quantized_sources_give_plain_modules(tmp_path: Path, source: str) -> None:
    opened = runner(make_checkpoint(tmp_path / "source", "glm4_moe", source))
    module = opened.build_layer(0, torch.nn.Identity())
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}


def test_config_that_transformers_refuses_names_the_file(folder: Path) -> None:
    edit_config(folder, lambda config: config.update(hidden_act=3, num_hidden_layers="three"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        runner(folder)

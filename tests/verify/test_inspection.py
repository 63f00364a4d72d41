"""`kvq inspect`: what a folder is, and what it lacks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvq.errors import CheckpointError
from kvq.verify.inspection import inspect_folder
from tests.checkpoints import INDEX, edit_config, make_checkpoint, read_json, write_json
from tests.runs import Shared


def test_a_source_and_its_output(shared: Shared) -> None:
    before, after = inspect_folder(shared.source("glm-5")), inspect_folder(shared.output("glm-5"))
    assert (before["title"], before["format"]) == ("GLM-5", "FP8 in 32x32 blocks")
    assert after["format"] == "INT4 in groups of 32"
    assert (before["written_by_kvq"], after["written_by_kvq"]) == (False, True)
    assert before["quantized_classes"] == after["quantized_classes"]
    assert before["dead_ignore_entries"] == ["model.layers.0.self_attn.indexers_proj"]
    assert after["dead_ignore_entries"] == [] and after["missing_side_files"] == []
    assert after["mtp_layers"] == [{"layer": 3, "tensors": after["mtp_layers"][0]["tensors"]}]
    assert after["mtp_layers"][0]["tensors"] > 0 and after["problems"] == []
    assert sum(row["tensors"] for row in after["classes"]) == after["tensors"]
    assert sum(row["bytes"] for row in after["classes"]) == after["bytes"]


def test_native_int4_and_vision(shared: Shared) -> None:
    report = inspect_folder(shared.source("kimi-k2.5"))
    assert report["format"] == "INT4 in groups of 32" and report["quantized_classes"] == ["routed experts"]
    assert "vision" in [row["class"] for row in report["classes"]]
    assert report["findings"]["MTP"] == "none"


def add_tensors(folder: Path, names: list[str]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **{name: torch.ones(1) for name in names}}, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "source", "names", "loaded"),
    [
        ("kimi_k2", "fp8_block", ["k_proj.k_scale", "v_proj.v_scale"], 2),
        ("kimi_k2", "fp8_block", ["k_scale", "v_scale"], 0),
        ("kimi_k2", "bf16", ["k_proj.k_scale", "v_proj.v_scale"], 0),  # no quantization, no parameter to load into
        ("glm4_moe", "fp8_channel", ["k_proj.k_scale", "k_scale", "attn.k_scale"], 0),
        ("glm_moe_dsa", "fp8_block", ["attn_mqa.k_scale"], 1),
    ],
)
def test_static_kv_scales_and_who_reads_them(
    tmp_path: Path, family: str, source: str, names: list[str], loaded: int
) -> None:
    folder = make_checkpoint(tmp_path / "model", family, source, single_file=True)
    add_tensors(folder, [f"model.layers.0.self_attn.{name}" for name in names])
    assert inspect_folder(folder)["kv_scales"] == {"count": len(names), "loaded_by_sglang": loaded}


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "kimi_k2")
    for name in ("tokenizer.json", "tiktoken.model", "chat_template.jinja", "configuration_deepseek.py", "LICENSE"):
        (folder / name).unlink()
    assert inspect_folder(folder)["missing_side_files"] == [
        "LICENSE", "tokenizer.json or tiktoken.model", "chat_template.jinja", "configuration_deepseek.py",
    ]  # fmt: skip


def test_a_promised_mtp_layer_that_is_not_there(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "glm4_moe")
    edit_config(folder, lambda config: config.update(num_nextn_predict_layers=2))
    assert "promises a layer that is not there" in inspect_folder(folder)["findings"]["MTP"]


def test_what_kvq_cannot_read_is_still_described(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "glm4_moe", "bf16")
    edit_config(
        folder, lambda config: config.update(model_type="unheard_of", quantization_config={"quant_method": "awq"})
    )
    report = inspect_folder(folder)
    assert (report["title"], report["format"]) == ("unheard_of", "a format that kvq does not read")
    assert len(report["problems"]) == 2 and report["tensors"] > 0


def test_damage_is_an_error(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "glm4_moe")
    index = read_json(folder / INDEX)
    index["weight_map"]["model.absent.weight"] = "model-00001-of-00003.safetensors"
    write_json(folder / INDEX, index)
    with pytest.raises(CheckpointError, match=r"says that model-00001-of-00003.safetensors holds model.absent.weight"):
        inspect_folder(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect_folder(tmp_path / "absent")

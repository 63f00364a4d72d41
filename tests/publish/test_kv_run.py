"""Calibrated scales in the files of `kvq calibrate-kv` and `kvq quantize`, for engines that use them or not."""

import json
from pathlib import Path

import pytest

from kvq.kv_plugin.scale_file import PluginError, read_scales
from kvq.publish.kv_run import REPORT_FILE, SCALES_SHARD
from kvq.publish.kv_scales import SCALES_FILE
from tests.checkpoints import TINY, Json, edit_tensor, make_checkpoint, read_json, read_tensors
from tests.conftest import Kvq
from tests.runs import SETTINGS, Shared, all_bytes, write_calibration

CALIBRATE = "kv_scales=calibrate"


def enlarged(folder: Path) -> Path:
    """GLM-4.x whose keys do not fit FP8 at 1.0."""
    make_checkpoint(folder, "glm4_moe", "fp8_channel")
    for layer in range(TINY.num_hidden_layers):
        edit_tensor(folder, f"model.layers.{layer}.self_attn.k_norm.weight", lambda w: w * 4096)
        edit_tensor(folder, f"model.layers.{layer}.self_attn.q_norm.weight", lambda w: w / 4096)
    return folder


def scales_of(folder: Path) -> Json:
    return read_json(folder / SCALES_FILE)


def settings() -> list[str]:
    return [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.mark.parametrize("target", ["sglang", "vllm"])
def test_quantize_delivers_only_to_the_engine_that_uses_scales(tmp_path: Path, kvq_main: Kvq, target: str) -> None:
    source, out = enlarged(tmp_path / "source"), tmp_path / "out"
    data = write_calibration(tmp_path / "data.jsonl")
    ran = kvq_main("quantize", source, "--w", "int4", *settings(), "--set", CALIBRATE, "--calibration", data,
                   "--out", out, "--target", target)  # fmt: skip
    assert ran.code == 0, ran.err
    content, tensors = scales_of(out), read_tensors(out)
    delivered = {name: float(value) for name, value in tensors.items() if name.endswith((".k_scale", ".v_scale"))}
    scheme = read_json(out / "config.json")["quantization_config"]["kv_cache_scheme"]
    if target == "sglang":
        assert not delivered and scheme is None and not (out / SCALES_SHARD).exists()
    else:
        rows = {layer: content["layers"][str(layer)] for layer in range(content["num_layers"])}
        assert delivered == {
            f"model.layers.{layer}.self_attn.{name}": pytest.approx(row[name])
            for layer, row in rows.items() for name in ("k_scale", "v_scale")
        }  # fmt: skip
        assert scheme["type"] == "float" and scheme["strategy"] == "tensor" and scheme["dynamic"] is False
    assert content["chosen"] != "one"
    assert set(content["layers"]) == {str(layer) for layer in range(TINY.num_hidden_layers + 1)}  # the draft layer too
    checked = kvq_main("verify", out, "--source", source, "--json")
    assert checked.code == 0, checked.err
    row = next(check for check in json.loads(checked.out)["checks"] if check["name"] == "KV scales")
    assert (f"{2 * TINY.num_hidden_layers} loaded, 0 ignored, 0 missing" in row["note"]) == (target == "vllm")
    assert read_scales(str(out / SCALES_FILE)).num_layers == TINY.num_hidden_layers


def test_side_files_may_be_measured_anew(tmp_path: Path, shared: Shared, kvq_main: Kvq) -> None:
    """They are not in the manifest, and what else the report holds stays."""
    out = shared.copy(shared.output("glm-4.7", CALIBRATE), tmp_path / "out")
    report = read_json(out / REPORT_FILE)
    (out / REPORT_FILE).write_text(json.dumps({**report, "simulations": {"fp8_e4m3": 1}}))
    data = write_calibration(tmp_path / "data.jsonl", rows=4, tokens=20)
    ran = kvq_main("calibrate-kv", out, "--calibration", data, "--held-out", data, "--out", out, "--json")
    assert ran.code == 0, ran.err
    again = read_json(out / REPORT_FILE)
    assert again["simulations"] == {"fp8_e4m3": 1} and again["held_out"]["num_documents"] == 4
    assert kvq_main("verify", out).code == 0


def test_a_run_without_data_says_nothing_about_its_cache(tmp_path: Path, shared: Shared, kvq_main: Kvq) -> None:
    out = tmp_path / "out"
    assert (
        kvq_main("quantize", shared.source("glm-4.7"), "--w", "int4-rtn", "--set", "group_size=32", "--out", out).code
        == 0
    )
    assert not (out / SCALES_FILE).exists() and not (out / REPORT_FILE).exists()


def test_kimi_k25_is_calibrated_as_it_is(tmp_path: Path, shared: Shared, kvq_main: Kvq) -> None:
    """Its INT4 weights pass through; only the cache is measured."""
    out, before = tmp_path / "out", all_bytes(shared.source("kimi-k2.5"))
    ran = kvq_main("calibrate-kv", shared.source("kimi-k2.5"), "--calibration", shared.calibration, "--out", out,
                   "--num-samples", 2, "--max-seq-length", 32)  # fmt: skip
    assert ran.code == 0, ran.err
    assert "withheld: would corrupt in sglang 0.5.17, sglang 0.5.23" in ran.out
    assert set(all_bytes(out)) == {SCALES_FILE, REPORT_FILE}
    assert all_bytes(shared.source("kimi-k2.5")) == before
    content = scales_of(out)
    assert content["attention"] == "mla" and not content["not_calibrated"]
    assert all(row["k_scale"] == row["v_scale"] > 0 for row in content["layers"].values())


def test_sparse_attention_says_that_the_engine_scales(tmp_path: Path, shared: Shared, kvq_main: Kvq) -> None:
    out = tmp_path / "out"
    ran = kvq_main("calibrate-kv", shared.source("glm-5"), "--calibration", shared.calibration, "--out", out,
                   "--num-samples", 2, "--max-seq-length", 32, "--json")  # fmt: skip
    report = json.loads(ran.out)
    assert all("scales dynamically" in row["reason"] for row in report["delivery"])
    assert "index_key" in report["stored_tensors"]["0"]
    with pytest.raises(PluginError, match="by itself"):
        read_scales(str(out / SCALES_FILE))


@pytest.mark.parametrize("place", ["", "kv", "deep/kv"])
def test_nothing_is_written_into_a_source(tmp_path: Path, shared: Shared, kvq_main: Kvq, place: str) -> None:
    source = shared.copy(shared.source("glm-5"), tmp_path / "source")
    before = sorted(source.rglob("*"))
    ran = kvq_main("calibrate-kv", source, "--calibration", shared.calibration, "--out", source / place,
                   "--num-samples", 2, "--max-seq-length", 32)  # fmt: skip
    assert ran.code == 7 and "lies inside the source" in ran.err
    assert sorted(source.rglob("*")) == before


def test_a_copy_with_scales_for_an_engine_that_uses_them(tmp_path: Path, kvq_main: Kvq) -> None:
    source, out = enlarged(tmp_path / "source"), tmp_path / "out"
    data = write_calibration(tmp_path / "data.jsonl", rows=4)
    ran = kvq_main("calibrate-kv", source, "--calibration", data, "--target", "vllm", "--out", out)
    assert ran.code == 0, ran.err
    before, after = read_tensors(source), read_tensors(out)
    assert {name for name in after if name not in before} == {
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(TINY.num_hidden_layers) for name in ("k_scale", "v_scale")
    }  # fmt: skip
    assert all(after[name].equal(tensor) for name, tensor in before.items() if tensor.dtype.itemsize > 1)
    assert read_json(out / "config.json")["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8

"""kvq-manifest.json: enough to know what was done, and nothing about the machine."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvq
from kvq.checkpoint.index import MANIFEST_NAME
from kvq.checkpoint.source import Source, resolve_source
from kvq.pipeline import prepare
from kvq.publish.manifest import RunRecord, build_manifest, manifest_text, summarize
from kvq.publish.serving_files import SERVING_FOLDER
from kvq.quantize.types import ModuleResult
from kvq.recipes.schema import Recipe, load_recipe, override
from tests.checkpoints import read_tensors
from tests.runs import CASES, PASS_THROUGH, QUANTIZED, SETTINGS, Shared, manifest_of, quantize, write_calibration

DTYPES = {"I32": "torch.int32", "I64": "torch.int64", "BF16": "torch.bfloat16", "F32": "torch.float32"}
DTYPES["F8_E4M3"] = "torch.float8_e4m3fn"


@pytest.mark.parametrize("name", CASES)
def test_every_file_has_its_hash(shared: Shared, name: str) -> None:
    out = shared.output(name)
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    listed = manifest_of(out)["files"]
    later = {file for file in files if file.startswith(f"{SERVING_FOLDER}/")}  # may be written anew
    assert later and listed.keys() == files - later - {MANIFEST_NAME}
    for file, digest in listed.items():
        assert hashlib.sha256((out / file).read_bytes()).hexdigest() == digest, file


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_was_written(shared: Shared, name: str) -> None:
    out = shared.output(name)
    planned, written, before = manifest_of(out)["tensors"], read_tensors(out), read_tensors(shared.source(name))
    assert planned.keys() == written.keys()
    for tensor_name, plan in planned.items():
        found = written[tensor_name]
        assert (DTYPES[plan["dtype"]], plan["shape"]) == (str(found.dtype), list(found.shape)), tensor_name
        assert plan["sources"] and all(source in before for source in plan["sources"])
    assert {source for plan in planned.values() for source in plan["sources"]} == before.keys()


@pytest.mark.parametrize("name", QUANTIZED)
def test_recipe_and_calibration_are_identified(shared: Shared, name: str) -> None:
    manifest = manifest_of(shared.output(name))
    recipe = override(load_recipe("int4"), SETTINGS)
    assert (manifest["recipe"]["name"], manifest["recipe_sha256"]) == ("int4-modified", recipe.sha256)
    assert Recipe.model_validate(manifest["recipe"]).sha256 == recipe.sha256
    assert manifest["kvq_version"] == kvq.__version__
    assert manifest["source"]["id"] == name and manifest["source"]["revision"] is None
    assert manifest["source"]["model_type"] == CASES[name].family
    calibration = manifest["calibration"]
    assert (calibration["name"], calibration["num_sequences"], calibration["num_tokens"]) == (
        "calibration.jsonl",
        8,
        512,
    )
    assert re.fullmatch(r"[0-9a-f]{64}", calibration["sha256"])


def test_other_data_has_another_hash(shared: Shared, tmp_path: Path) -> None:
    data = write_calibration(tmp_path / "calibration.jsonl")
    first = quantize(shared.source("kimi-k2"), tmp_path / "a", data)["calibration"]
    data.write_text(data.read_text().replace("12, 18", "18, 12", 1))
    second = quantize(shared.source("kimi-k2"), tmp_path / "b", data)["calibration"]
    assert first["sha256"] == manifest_of(shared.output("kimi-k2"))["calibration"]["sha256"] != second["sha256"]
    assert first["name"] == second["name"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_quantized_matrix_has_a_result(shared: Shared, name: str) -> None:
    manifest = manifest_of(shared.output(name))
    planned = {name.removesuffix(".weight_packed") for name in manifest["tensors"] if name.endswith(".weight_packed")}
    rows = manifest["modules"]
    assert [row["name"] for row in rows] and {row["name"] for row in rows} == planned and len(rows) == len(planned)
    for row in rows:
        assert row["outcome"] == "solved" and row["num_tokens"] >= 0 and 0 < row["dampening_frac"] <= 1
        assert 0 < row["relative_output_error"] < 0.2 and 0 < row["relative_weight_error"] < 0.2
        assert row["blend_weight"] == pytest.approx(256 / (256 + row["num_tokens"]))


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_this_machine(shared: Shared, name: str) -> None:
    text = (shared.output(name) / MANIFEST_NAME).read_text(encoding="utf-8")
    assert str(shared.root) not in text
    assert re.search(r'"/|"~|[A-Z]:\\\\', text) is None
    assert re.search(r"\b20\d\d-\d\d-\d\d", text) is None  # no time of day either


@pytest.mark.parametrize("name", CASES)
def test_sizes_in_the_summary_are_those_on_disk(shared: Shared, name: str) -> None:
    manifest, out = manifest_of(shared.output(name)), shared.output(name)
    summary = manifest["summary"]
    assert summary["output_bytes"] == sum(tensor.nbytes for tensor in read_tensors(out).values())
    assert summary["source_bytes"] == sum(tensor.nbytes for tensor in read_tensors(shared.source(name)).values())
    assert summary["num_quantized_modules"] == len(manifest["modules"])
    if name != PASS_THROUGH:  # 4 bits, a BF16 scale for 32 weights, and 16 bytes of shape for 64 x 64
        assert summary["bits_per_weight"] == pytest.approx(4 + 16 / 32 + 128 / 4096, abs=1e-4)


def test_summary_lists_the_worst_and_the_starved(shared: Shared) -> None:
    summary, rows = (manifest_of(shared.output("glm-5"))[key] for key in ("summary", "modules"))
    worst = sorted(rows, key=lambda row: -row["relative_output_error"])[:5]
    assert [row["name"] for row in summary["worst_modules"]] == [row["name"] for row in worst]
    tokens = {row["name"].rsplit(".", 1)[0]: row["num_tokens"] for row in rows}
    few = {expert: count for expert, count in tokens.items() if count < 64}
    assert summary["num_experts"] == len(tokens) == 24
    assert 0 < len(few) <= 10 and summary["experts_with_fewest_tokens"] == few
    assert summary["num_experts_below_64_tokens"] == len(few)
    mean = sum(row["relative_weight_error"] for row in rows) / len(rows)
    assert summary["mean_relative_weight_error"] == pytest.approx(mean, abs=1e-6)


def test_fallbacks_are_counted_and_named(shared: Shared) -> None:
    prepared = prepare(resolve_source(str(shared.source("kimi-k2"))), Recipe(name="r", group_size=32), Path("nowhere"))
    common: dict[str, Any] = {"num_tokens": 3, "blend_weight": 0.9, "dampening_frac": 0.1, "relative_weight_error": 0.1}
    solved = ModuleResult(name="layers.1.a.up_proj", outcome="solved", relative_output_error=0.1, **common)
    rounded = ModuleResult(name="layers.1.a.down_proj", outcome="rounded", relative_output_error=None, **common)
    failed = ModuleResult(
        name="layers.1.b.up_proj", outcome="hessian_not_positive_definite", relative_output_error=0.2, **common
    )
    summary = summarize(prepared.plan, [solved, rounded, failed])
    assert summary["num_fallbacks"] == 1
    assert summary["fallbacks"] == [{"name": "layers.1.b.up_proj", "outcome": "hessian_not_positive_definite"}]


def test_a_hub_source_is_named_by_id_and_commit(shared: Shared) -> None:
    source = Source(shared.source("kimi-k2"), "moonshotai/Kimi-K2-Instruct", "0" * 40)
    plan = prepare(source, Recipe(name="r", group_size=32), Path("nowhere")).plan
    described = build_manifest(plan, RunRecord(source, "vllm", "cpu", None), [], {})["source"]
    assert (described["id"], described["revision"]) == ("moonshotai/Kimi-K2-Instruct", "0" * 40)


def test_text_is_json_with_a_line_for_each_row() -> None:
    value = {"a": 1, "b": {}, "c": {"x": [1, 2], "y": {"z": "\u00e9"}}, "d": [{"e": None}, 2], "f": []}
    text = manifest_text(value)
    assert json.loads(text) == value
    assert text.splitlines()[4:6] == ['    "x": [1, 2],', '    "y": {"z": "\u00e9"}']
    with pytest.raises(ValueError, match="JSON compliant"):
        manifest_text({"a": float("nan")})

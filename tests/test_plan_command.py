"""`kvq plan` and `kvq inspect` as a person and a program meet them."""

import json
from pathlib import Path

import pytest

from kvq.checkpoint.reader import CheckpointReader
from tests.conftest import Kvq
from tests.runs import CASES, SETTINGS, Shared

SET = [f"--set={setting}" for setting in SETTINGS]
SMALL = [*SET, "--gpus=1"]


@pytest.mark.parametrize("name", CASES)
def test_a_plan_of_every_family(shared: Shared, kvq_main: Kvq, name: str) -> None:
    said = kvq_main("plan", shared.source(name), *SMALL)
    assert said.code == 0 and said.err == ""
    for words in ("routed experts", "before:", "after:", "files:", "1 x NVIDIA H200", "weights a GPU", "bytes a token",
                  "TP x EP that fit", "the run, on cuda", "disk", "host memory"):  # fmt: skip
        assert words in said.out, words


def test_no_weights_are_read(shared: Shared, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: CheckpointReader, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(CheckpointReader, "tensor", forbidden)
    assert kvq_main("plan", shared.source("glm-5"), *SMALL).code == 0


def test_json_says_what_the_dry_run_says(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    said = kvq_main("plan", shared.source("glm-5"), *SMALL, "--json")
    report = json.loads(said.out)
    dry = json.loads(
        kvq_main("quantize", shared.source("glm-5"), *SET, "--dry-run", "--json", "--out", tmp_path / "out").out
    )
    assert said.err == "" and report["origin"] == "folder"
    assert report["output"]["tensor_bytes"] == dry["output_bytes"]
    assert report["source"]["tensor_bytes"] == dry["source_bytes"]
    assert report["recipe_sha256"] == dry["recipe_sha256"] and report["warnings"] == dry["warnings"]
    assert {row["class"]: row["output_bytes"] for row in report["classes"]} == {
        title: sum(row["output_bytes"] for row in dry["classes"] if row["class"] == title)
        for title in {row["class"] for row in dry["classes"]}
    }
    assert all(row["reason"] and row["planned"] for row in report["classes"])


def test_an_alias_is_planned_from_facts(kvq_main: Kvq) -> None:
    said = kvq_main("plan", "glm-5.2", "--gpu=h200", "--context=131072", "--kv-dtype=bf16")
    assert said.code == 0
    for words in ("118,629 tensors", "755,617,140,416 bytes = 755.62 GB (703.72 GiB)", "399.71 GB (372.26 GiB)",
                  "facts shipped with kvq", "95,232", "requests of 131,072", "profile 2026-11-30_h200_glm-5.2-layer",
                  "source: zhao9797/ai-research"):  # fmt: skip
        assert words in " ".join(said.out.split()), words
    assert "fp8_e4m3" not in said.out


def test_assumptions_are_said(kvq_main: Kvq) -> None:
    said = kvq_main("plan", "glm-4.7", "--set=group_size=128")
    assert "note: assumed, not read anywhere:" in said.out
    assert "cannot be served so: an expert's slice is 1536/8 = 192 columns: no whole groups of 128" in said.out


def test_ranks_and_what_each_writes(shared: Shared, kvq_main: Kvq) -> None:
    arguments = ("plan", shared.source("glm-5"), *SMALL, "--ranks=3")
    report = json.loads(kvq_main(*arguments, "--json").out)
    rows = report["ranks"]
    assert [(row["first_expert"], row["num_experts"], row["num_sequences"]) for row in rows] == [
        (0, 2, 2), (2, 3, 3), (5, 3, 3),
    ]  # fmt: skip
    assert sum(row["shards"] for row in rows) == report["output"]["shards"]
    assert sum(row["tensor_bytes"] for row in rows) == report["output"]["tensor_bytes"]
    assert report["run"]["host_bytes"] == 3 * report["run"]["host_bytes_per_rank"]
    said = kvq_main(*arguments)
    assert "experts of each layer" in said.out and "for 3 ranks on one host" in " ".join(said.out.split())
    assert kvq_main("plan", shared.source("glm-5"), *SMALL, "--ranks=9").code == 2
    assert json.loads(kvq_main("plan", shared.source("glm-5"), *SMALL, "--json").out)["ranks"] == []


def test_recipes_side_by_side(kvq_main: Kvq) -> None:
    rows = json.loads(kvq_main("plan", "glm-5.2", "--compare", "int4", "int4-g32", "--json").out)
    assert [row["recipe"] for row in rows] == ["int4", "int4-g32"]
    assert rows[0]["tensor_bytes"] < rows[1]["tensor_bytes"]
    said = kvq_main("plan", "glm-5.2", "--compare", "int4", "int4-g32")
    assert said.code == 0 and "int4-g32" in said.out and "4.125" in said.out and "4.5" in said.out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["glm-5.2", "int4", "int4-g32"], 2, "unexpected int4 int4-g32"),
        (["glm-5.2", "--compare", "int4"], 2, "--compare takes two recipes or more"),
        (["glm-5.2", "--compare", "int4", "int4-g32", "--w", "int4"], 2, "--compare takes two recipes or more"),
        (["glm-5.2", "--w=int4", "--recipe=int4"], 2, "both name a recipe"),
        (["glm-5.2", "--gpu=a100"], 2, "--gpu a100: not in kvq's table"),
        (["glm-5.2", "--tp=3"], 2, "--gpus 8 is no multiple of --tp 3"),
        (["glm-5.2", "--context=9999999"], 2, "the model's config allows 1048576"),
        (["glm-5.2", "--revision=main"], 3, "--revision needs a Hub id"),
        (["kimi-k2-0905"], 3, "facts not shipped"),
        (["no-such-model"], 3, "no such folder, no known alias"),
    ],
)
def test_errors_are_one_sentence(kvq_main: Kvq, arguments: list[str], code: int, says: str) -> None:
    said = kvq_main("plan", *arguments)
    assert (said.code, said.out) == (code, "") and says in said.err and len(said.err.splitlines()) == 1


def test_inspect_speaks_both_ways(shared: Shared, kvq_main: Kvq) -> None:
    said = kvq_main("inspect", shared.output("glm-5"))
    assert said.code == 0
    for words in ("GLM-5, INT4 in groups of 32", "routed experts", "KV scales: none", "MTP: layer 3:",
                  "dead ignore entries: none", "side files missing: none"):  # fmt: skip
        assert words in said.out, words
    report = json.loads(kvq_main("inspect", shared.output("glm-5"), "--json").out)
    assert report["written_by_kvq"] is True

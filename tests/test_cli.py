"""The command as a person and a program meet it: what lands on stdout and stderr, exit codes, names, Ctrl-C."""

import json
import os
import signal
from pathlib import Path
from shutil import copytree

import pytest

from kvq.checkpoint.index import MANIFEST_NAME
from kvq.checkpoint.reader import CheckpointReader
from kvq.console import RunProgress
from kvq.recipes.models import known_models
from tests.checkpoints import edit_tensor
from tests.conftest import Kvq
from tests.runs import SETTINGS, Shared, all_bytes, manifest_of, output_bytes

SET = [f"--set={setting}" for setting in SETTINGS]


def test_quantize_shows_a_plan_progress_and_a_result(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = kvq_main("quantize", shared.source("glm-5"), *SET, "--calibration", shared.calibration, "--out", out)
    assert said.code == 0
    assert said.out.strip() == str(out)  # the one result; all words go to stderr
    for words in (
        "GLM-5, FP8 in 32x32 blocks", "routed experts", "INT4 g32, gptq", "tensors before", "layer 4/4 done",
        "bits per weight", "worst", "few tokens", "fallbacks", "calibrated on", "serve with", "peak memory",
        "the source's config ignores 'model.layers.0.self_attn.indexers_proj', but no module has that name",
    ):  # fmt: skip
        assert words in said.err, words
    assert output_bytes(out) == all_bytes(shared.output("glm-5"))
    assert (out / "kvq-reports" / "coverage.json").is_file() and "coverage: kvq-reports/coverage.json" in said.err


def test_no_bar_and_no_colours_off_a_terminal(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    said = kvq_main("quantize", shared.source("kimi-k2.5"), "--out", tmp_path / "out")
    assert "\x1b" not in said.err + said.out and "\r" not in said.err
    assert [line.split(" done")[0] for line in said.err.splitlines() if " done " in line] == [
        "layer 1/3", "layer 2/3", "layer 3/3",
    ]  # fmt: skip


def test_json_is_one_object_and_nothing_else(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = kvq_main("quantize", shared.source("kimi-k2"), *SET, "--set=solver=rtn", "--out", out, "--json")
    report = json.loads(said.out)
    assert said.code == 0 and said.err == ""
    assert report["out"] == str(out) and report["summary"] == manifest_of(out)["summary"]
    assert report["recipe"]["solver"] == "rtn" and report["calibration"] is None
    assert report["seconds"] >= 0 and report["peak_host_bytes"] > 0


def test_embedded_data_is_the_default(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    said = kvq_main("quantize", shared.source("glm-4.7"), *SET, "--out", tmp_path / "out", "--json")
    calibration = json.loads(said.out)["calibration"]
    assert (calibration["name"], calibration["num_sequences"]) == ("embedded", 8)


@pytest.mark.parametrize("as_json", [True, False])
def test_dry_run_reads_no_weights_and_writes_nothing(
    shared: Shared, kvq_main: Kvq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def forbidden(self: CheckpointReader, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(CheckpointReader, "tensor", forbidden)
    monkeypatch.chdir(tmp_path)
    said = kvq_main("quantize", shared.source("glm-5"), *SET, "--dry-run", *(["--json"] if as_json else []))
    assert said.code == 0
    assert list(tmp_path.iterdir()) == []
    if not as_json:
        assert said.err == "" and "tensors before" in said.out
        return
    plan, summary = json.loads(said.out), manifest_of(shared.output("glm-5"))["summary"]
    assert said.err == "" and plan["out"] == "glm-5-int4-modified"
    assert (plan["source_bytes"], plan["output_bytes"]) == (summary["source_bytes"], summary["output_bytes"])
    assert plan["num_quantized_modules"] == summary["num_quantized_modules"]
    assert all(row["reason"] for row in plan["classes"])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"text": "the tree"', "data.jsonl:1: not valid JSON"),
        ('{"input_ids": [1, 999999]}', "data.jsonl:1: token id 999999"),
        ('{"input_ids": [1, 2]}', "gives 2 tokens, too few"),
    ],
)
def test_dry_run_checks_given_data(shared: Shared, kvq_main: Kvq, tmp_path: Path, row: str, says: str) -> None:
    (tmp_path / "data.jsonl").write_text(row)
    given = ["--calibration", tmp_path / "data.jsonl"]
    said = kvq_main("quantize", shared.source("glm-5"), *SET, *given, "--out", tmp_path / "out", "--dry-run")
    assert said.code == 4 and said.out == "" and says in said.err, said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "recipe", "name"),
    [
        ("kimi-k2", ["--w", "int4-g32"], "kimi-k2-int4-g32"),
        ("kimi-k2/", ["--w", "int4-g32", "--set=solver=rtn"], "kimi-k2-int4-g32-modified"),
        ("./kimi-k2", ["--recipe", "int4-g64"], "kimi-k2-int4-g64"),
        ("../sources/kimi-k2.5", [], "kimi-k2.5-int4"),
        ("kimi-k2/../kimi-k2/.", ["--w", "int4-g32"], "kimi-k2-int4-g32"),
    ],
)
def test_default_name_of_the_output(
    shared: Shared, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch, model: str, recipe: list[str], name: str
) -> None:
    assert shared.source("kimi-k2") and shared.source("kimi-k2.5")
    monkeypatch.chdir(shared.root / "sources")
    said = kvq_main("quantize", model, *recipe, "--dry-run", "--json")
    assert json.loads(said.out)["out"] == name


def test_a_folder_named_by_a_dot(
    shared: Shared, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(shared.source("kimi-k2"))
    said = kvq_main("quantize", ".", *SET, "--set=solver=rtn", "--out", tmp_path / "out", "--json")
    assert said.code == 0 and json.loads(said.out)["source"]["id"] == "kimi-k2"


def test_an_alias_is_downloaded_from_the_hub(
    shared: Shared, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The alias chooses Hub id, recipe and the output's name; the commit is recorded."""
    from kvq.checkpoint import source

    asked = []

    def download(repo: str, revision: str | None, *more: object) -> source.Source:
        asked.append((repo, revision))
        return source.Source(shared.source("kimi-k2"), repo, "c" * 40)

    monkeypatch.setattr(source, "download", download)
    monkeypatch.chdir(tmp_path)
    said = kvq_main("quantize", "kimi-k2", *SET, "--set=solver=rtn", "--revision", "main", "--json")
    assert asked == [("moonshotai/Kimi-K2-Instruct", "main")]
    report = json.loads(said.out)
    assert report["out"] == "kimi-k2-int4-modified"
    assert report["source"]["id"] == "moonshotai/Kimi-K2-Instruct" and report["source"]["revision"] == "c" * 40


def test_a_recipe_file(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\nsolver: rtn\ngroup_size: 32\nmtp: rtn\nrest: bf16\n")
    said = kvq_main("quantize", shared.source("kimi-k2"), "--recipe", recipe, "--out", tmp_path / "out", "--json")
    assert said.code == 0
    recorded = manifest_of(tmp_path / "out")["recipe"]
    assert (recorded["name"], recorded["rest"], recorded["solver"]) == ("mine", "bf16", "rtn")


def test_target_and_device_are_recorded(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    flags = ["--target=vllm", "--device=cpu", "--out", tmp_path / "out", "--json"]
    said = kvq_main("quantize", shared.source("kimi-k2"), *SET, "--set=solver=rtn", *flags)
    report = json.loads(said.out)
    assert (report["target"], report["device"], report["serving"]["engine"]) == ("vllm", "cpu", "vllm")


def test_verify(shared: Shared, kvq_main: Kvq) -> None:
    out, source = shared.output("kimi-k2"), shared.source("kimi-k2")
    said = kvq_main("verify", out, "--source", source)
    assert said.code == 0 and "packed weights" in said.out and "FAILED" not in said.out and said.err == ""
    report = json.loads(kvq_main("verify", out, "--source", source, "--json").out)
    assert report["passed"] is True and len(report["checks"]) == 10


def test_a_failed_verification_says_so(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    folder = shared.copy(shared.output("kimi-k2"), tmp_path / "folder")
    edit_tensor(folder, "model.norm.weight", lambda value: value * 2)
    said = kvq_main("verify", folder, "--source", shared.source("kimi-k2"))
    assert said.code == 5 and "FAILED" in said.out
    assert said.err.startswith("kvq: ") and said.err.count("\n") == 1
    assert "model.norm.weight differs" in said.err and "Traceback" not in said.err
    said = kvq_main("verify", folder, "--json")
    assert said.code == 5 and json.loads(said.out)["passed"] is False


def test_models(kvq_main: Kvq) -> None:
    said = kvq_main("models")
    rows = json.loads(kvq_main("models", "--json").out)
    assert said.code == 0 and said.err == ""
    assert [row["alias"] for row in rows] == list(known_models())
    for row in rows:
        assert all(row[key] in said.out for key in ("alias", "hub", "recipe"))
    aliases = "glm-5.2 glm-5.1 glm-5 glm-4.7 glm-4.6 glm-4.5 kimi-k2 kimi-k2-0905 kimi-k2-thinking kimi-k2.5 kimi-k2.6"
    assert [row["alias"] for row in rows] == aliases.split()


def test_ctrl_c(shared: Shared, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real signal, in the middle: 130, one sentence, no output under its name; the same command then finishes."""

    def interrupt(self: RunProgress, layer: int, num_layers: int) -> None:
        if layer == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "layer_done", interrupt)
        arguments = [
            "quantize",
            shared.source("kimi-k2"),
            *SET,
            "--set=solver=rtn",
            "--out",
            tmp_path / "out",
            "--json",
        ]
        said = kvq_main(*arguments)
    assert (said.code, said.out) == (130, "")
    assert (
        said.err.startswith("kvq: Stopped after layer 2 of 3. What is finished is kept") and said.err.count("\n") == 1
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    assert not (tmp_path / "out.partial" / MANIFEST_NAME).exists()
    assert kvq_main(*arguments).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_folder_gets_its_name_last(
    shared: Shared, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """When the rename comes, everything is there: manifest included."""
    seen: list[set[str]] = []
    rename = Path.rename

    def watched(self: Path, target: Path) -> Path:
        if target == tmp_path / "out":
            seen.append({str(path.relative_to(self)) for path in self.rglob("*") if path.is_file()})
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    kvq_main("quantize", shared.source("kimi-k2.5"), "--out", tmp_path / "out")
    assert seen == [output_bytes(tmp_path / "out").keys()]
    assert MANIFEST_NAME in seen[0]


def test_an_empty_folder_may_be_given(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert kvq_main("quantize", shared.source("kimi-k2.5"), "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / MANIFEST_NAME).exists()


def test_what_kvq_left_in_the_source_is_not_taken_for_the_output_s(
    shared: Shared, kvq_main: Kvq, tmp_path: Path
) -> None:
    """`kvq serve-config SOURCE` writes there, and the output's own files of these names change after the manifest."""
    source, out = copytree(shared.source("kimi-k2"), tmp_path / "source"), tmp_path / "out"
    assert kvq_main("serve-config", source, "--gpus", "1").code == 0
    (source / "kvq-reports").mkdir()
    (source / "kvq-reports" / "distance.json").write_text("{}")
    said = kvq_main("quantize", source, *SET, "--set=solver=rtn", "--out", out)
    assert said.code == 0 and "not copied from the source: kvq-reports/, serving/, which kvq writes" in said.err
    assert not (out / "kvq-reports" / "distance.json").exists()
    assert kvq_main("serve-config", out, "--gpus", "1").code == 0
    assert kvq_main("verify", out).code == 0


def test_an_output_of_kvq_is_no_source(shared: Shared, kvq_main: Kvq, tmp_path: Path) -> None:
    """Its experts would pass through as if their makers had trained them in INT4, with the reports of another run."""
    said = kvq_main("quantize", shared.output("kimi-k2"), "--w", "int4", "--out", tmp_path / "out")
    assert said.code == 3 and "is an output of kvq (kvq-manifest.json). Quantize the checkpoint that it was" in said.err
    assert not (tmp_path / "out").exists()

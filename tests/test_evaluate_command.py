"""`kvq evaluate`: its files, its gates' exit codes, and requests that make no sense."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvq import __version__
from kvq.checkpoint.index import MANIFEST_NAME
from tests.conftest import Kvq
from tests.runs import Shared, all_bytes

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def output(shared: Shared, tmp_path: Path) -> Path:
    """A quantized Kimi K2 that may get reports."""
    return shared.copy(shared.output("kimi-k2"), tmp_path / "output")


@pytest.fixture
def flags(shared: Shared) -> tuple[object, ...]:
    """A quick evaluation."""
    return ("--source", shared.source("kimi-k2"), "--data", shared.calibration, "--max-rows=2", "--max-seq-length=12")


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "kvq-reports" / name).read_text())
    assert found["kvq_version"] == __version__
    return found


def gate_recipe(folder: Path, gates: object) -> None:
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["recipe"]["gates"] = gates
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


def test_writes_reports_and_plots(output: Path, flags: tuple[object, ...], kvq_main: Kvq) -> None:
    said = kvq_main("evaluate", output, *flags)
    assert said.code == 0 and "\r" not in said.err
    for words in ("Mean KLD", "Same top p", "Cor(ln(PPL(Q)), ln(PPL(base)))", "worst layer: ", "worst expert: layer"):
        assert words in said.out
    distance, damage = read(output, "distance.json"), read(output, "damage.json")
    assert (distance["schema"], damage["schema"]) == ("kvq.distance/1", "kvq.damage/1")
    manifest = json.loads((output / MANIFEST_NAME).read_text())
    assert distance["checkpoint"]["recipe_sha256"] == manifest["recipe_sha256"]
    assert [row["layer"] for row in damage["layers"]] == [0, 1, 2]
    plots = {path.name: path.read_bytes() for path in (output / "kvq-reports").glob("*.png")}
    assert set(plots) == {"distance-positions.png", "damage-layers.png", "damage-routers.png", "damage-experts.png"}
    assert all(content.startswith(PNG) and len(content) > 5000 for content in plots.values())
    assert "wrote distance.json, damage.json, distance-positions.png" in said.err
    again = all_bytes(output / "kvq-reports")
    kvq_main("evaluate", output, *flags)
    assert all_bytes(output / "kvq-reports") == again
    assert kvq_main("verify", output).code == 0


def test_another_source_than_the_recorded_one_is_said(
    output: Path, shared: Shared, flags: tuple[object, ...], kvq_main: Kvq, tmp_path: Path
) -> None:
    """A copy of the output itself would make it look perfect, on the card too."""
    twin = shared.copy(output, tmp_path / "twin")
    said = kvq_main("evaluate", output, "--source", twin, *flags[2:], "--no-damage")
    note = "compared with a model in INT4"
    assert said.code == 0 and note in said.out
    card = kvq_main("card", output, "--base-model", "owner/name", "--print").out
    assert f"> {note}" in card


def test_nothing_is_said_of_the_recorded_one(output: Path, flags: tuple[object, ...], kvq_main: Kvq) -> None:
    kvq_main("evaluate", output, *flags, "--no-damage")
    assert read(output, "distance.json")["notes"] == []


def test_off_a_terminal_it_says_what_it_is_at(
    output: Path, flags: tuple[object, ...], kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvq.console.screen.LINE_SECONDS", 0.0)
    assert "layer 2/3" in kvq_main("evaluate", output, *flags).err


def test_json_is_the_reports(output: Path, flags: tuple[object, ...], kvq_main: Kvq, tmp_path: Path) -> None:
    said = kvq_main("evaluate", output, *flags, "--json", "--report", tmp_path / "there", "--no-damage")
    found = json.loads(said.out)
    assert said.code == 0 and found["distance"]["figures"]["num_documents"] == 2
    assert found["damage"] is None and found["kv"] is None
    assert not (output / "kvq-reports").exists()
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"distance.json", "distance-positions.png"}


def test_fp8_kv_goes_into_kv_json_and_spares_the_rest(output: Path, flags: tuple[object, ...], kvq_main: Kvq) -> None:
    reports = output / "kvq-reports"
    reports.mkdir()
    (reports / "kv.json").write_text(json.dumps({"schema": "kvq.kv/1", "calibration": {"a": 1}}))
    said = kvq_main("evaluate", output, *flags, "--kv-dtype=fp8_e4m3")
    assert said.code == 0 and "KV cache in FP8: largest relative error" in said.out
    found = read(output, "kv.json")
    assert found["calibration"] == {"a": 1} and list(found["simulations"]) == ["fp8_e4m3"]
    row = found["simulations"]["fp8_e4m3"]
    assert row["distance"]["settings"]["kv_dtype"] == "fp8_e4m3"
    assert [(part["layer"], part["tensor"]) for part in row["stored"][:2]] == [(0, "k_pe"), (0, "latent")]
    assert not (reports / "distance.json").exists()
    assert (reports / "damage-fp8_e4m3.json").exists() and (reports / "damage-layers-fp8_e4m3.png").exists()


def test_a_source_gets_no_files(shared: Shared, flags: tuple[object, ...], kvq_main: Kvq) -> None:
    source = shared.source("kimi-k2")
    before = set(all_bytes(source))
    said = kvq_main("evaluate", source, *flags)
    assert said.code == 0 and "no reports were written into the source's folder" in said.err
    assert set(all_bytes(source)) == before


@pytest.mark.parametrize(
    ("gate", "code", "says"),
    [
        ("--max-mean-kl=1", 0, ""),
        ("--max-mean-kl=0", 10, "mean KL is "),
        ("--min-same-top=0", 0, ""),
        ("--max-ppl-ratio=0.01", 10, "above max_ppl_ratio 0.01"),
        ("--min-recovery=gsm8k=98", 0, ""),
        ("--min-recovery=gsm8k=99", 10, "recovery of gsm8k is 98.5, below min_recovery 99"),
    ],
)
def test_gates_on_the_command_line(
    output: Path, flags: tuple[object, ...], kvq_main: Kvq, gate: str, code: int, says: str
) -> None:
    (output / "kvq-reports").mkdir()
    tasks = {"schema": "kvq.tasks/1", "tasks": {"gsm8k": {"source": {}, "quantized": {}, "recovery": 98.5}}}
    (output / "kvq-reports" / "tasks-gsm8k.json").write_text(json.dumps(tasks))
    said = kvq_main("evaluate", output, *flags, "--no-damage", gate)
    assert said.code == code and (says in said.err)
    assert said.out.rstrip().endswith("FAILED" if code else "passed")
    (result,) = read(output, "distance.json")["gates"]  # written whether it passed or not
    assert result["passed"] is (code == 0)


def test_gates_in_the_recipe(output: Path, flags: tuple[object, ...], kvq_main: Kvq) -> None:
    gate_recipe(output, {"max_mean_kl": 0.0, "min_recovery": {}})
    said = kvq_main("evaluate", output, *flags, "--no-damage")
    assert said.code == 10 and said.err.rstrip().endswith("(1 of 1 gates failed).") and " +/- " in said.err
    assert kvq_main("evaluate", output, *flags, "--no-damage", "--max-mean-kl=9").code == 0
    gate_recipe(output, {"max_kl": 0.0})
    said = kvq_main("evaluate", output, *flags, "--no-damage")
    assert said.code == 2 and "recipe.gates: max_kl: there is no such field; there are max_mean_kl, " in said.err


def test_without_matplotlib(
    output: Path, flags: tuple[object, ...], kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvq.verify.reports.find_spec", lambda name: None)
    said = kvq_main("evaluate", output, *flags, "--no-damage")
    assert said.code == 0 and "no plots: matplotlib is not installed (pip install 'kvq[plots]')" in said.err
    assert {path.name for path in (output / "kvq-reports").iterdir()} == {"distance.json"}


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["--kv-scales=x.json"], 2, "only --kv-dtype makes use of them"),
        (["--kv-dtype=fp8_ds_mla"], 2, "is a layout of DSA"),
        (["--kv-dtype=fp8_e4m3", "--kv-scales=x.json"], 3, "x.json"),
        (["--min-recovery=x"], 2, "expected TASK=PERCENT"),
        (["--min-same-top=2"], 2, "min-same-top"),
        (["--base-logits=x"], 5, "is no file of base logits"),
        (["--long-context=100000"], 4, "fewer than one sequence of --long-context"),
        (["--data=."], 4, ".: is a folder; its files are domains"),
        (["--source=nothing-there"], 3, "no such folder, no known alias"),
    ],
)
def test_requests_that_make_no_sense(
    output: Path, flags: tuple[object, ...], kvq_main: Kvq, more: list[str], code: int, says: str
) -> None:
    said = kvq_main("evaluate", output, *flags, *more)
    assert said.code == code and says in said.err and "Traceback" not in said.err


def test_data_is_needed(output: Path, shared: Shared, kvq_main: Kvq) -> None:
    said = kvq_main("evaluate", output, "--source", shared.source("kimi-k2"))
    assert (said.code, said.err) == (2, "kvq: --data: give at least one file of held-out rows.\n")


def test_reports_of_another_schema(output: Path, flags: tuple[object, ...], kvq_main: Kvq) -> None:
    (output / "kvq-reports").mkdir()
    (output / "kvq-reports" / "kv.json").write_text('{"schema": "other/1"}')
    said = kvq_main("evaluate", output, *flags, "--no-damage", "--kv-dtype=fp8_e4m3")
    assert said.code == 5 and "its schema is 'other/1', this kvq reads 'kvq.kv/1'" in said.err
    assert (output / "kvq-reports" / "kv.json").read_text() == '{"schema": "other/1"}'

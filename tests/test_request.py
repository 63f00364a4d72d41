"""Flags and paths as people type them: what is refused, and what `~` means."""

import os
from pathlib import Path

import pytest

from tests.conftest import Kvq
from tests.runs import SETTINGS, Shared, manifest_of

SET = [*(f"--set={setting}" for setting in SETTINGS), "--set=solver=rtn"]


@pytest.mark.parametrize("command", ["quantize", "plan"])
def test_a_revision_of_a_folder_is_refused(shared: Shared, kvq_main: Kvq, tmp_path: Path, command: str) -> None:
    out = ["--out", tmp_path / "out"] if command == "quantize" else []
    said = kvq_main(command, shared.source("kimi-k2"), *SET, "--revision", "main", *out)
    assert said.code == 3 and "is a folder" in said.err and "--revision main" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["quantize", "plan"])
def test_an_empty_model_is_not_this_folder(
    shared: Shared, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(shared.source("kimi-k2"))
    said = kvq_main(command, "", *SET)
    assert said.code == 3 and "MODEL is empty" in said.err


@pytest.mark.parametrize("flags", [["--out", ""], ["--calibration", ""]])
def test_an_empty_path_is_refused(
    shared: Shared, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = kvq_main("quantize", shared.source("kimi-k2"), *SET, *flags)
    assert said.code == 2 and "the path is empty" in said.err


def test_the_home_folder(shared: Shared, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_bytes(shared.calibration.read_bytes())
    (tmp_path / "model").symlink_to(shared.source("kimi-k2"))
    settings = [f"--set={setting}" for setting in SETTINGS]
    said = kvq_main("quantize", "~/model", *settings, "--calibration=~/data.jsonl", "--out=~/out", "--events=~/log")
    assert said.code == 0, said.err
    assert (tmp_path / "log").exists() and manifest_of(tmp_path / "out")["calibration"]["name"] == "data.jsonl"
    assert (tmp_path / "out" / "config.json").exists() and not (tmp_path / "~").exists()
    said = kvq_main("verify", "~/out", "--source", "~/model")
    assert said.code == 0, said.err


def test_the_home_of_nobody_is_no_traceback(kvq_main: Kvq) -> None:
    said = kvq_main("quantize", "~nobody-of-this-name/model", *SET)
    assert said.code == 3 and said.err.startswith("kvq: ~nobody-of-this-name/model: no such folder")


def test_control_characters_do_not_reach_the_terminal(kvq_main: Kvq, tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[31m\nb"
    os.mkdir(folder)
    said = kvq_main("quantize", folder, *SET, "--out", tmp_path / "out")
    assert said.code == 3 and "\x1b" not in said.err and said.err.count("\n") == 1
    assert "\\x1b[31m\\nb" in said.err

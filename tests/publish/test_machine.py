"""`kvq doctor` and `kvq --version`: what they find is what is there, and they leave nothing behind."""

import json
import os
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvq
from kvq.publish import machine
from kvq.publish.machine import Engine, Finding, check_disk, check_engine, check_hub, check_packages, check_python
from tests.conftest import Kvq
from tests.hub.server import Hub

ROOT = Path(kvq.__file__).parent.parent
RANGES = ["torch>=2.0", "transformers<0.1", "no-such-package>=1", "typer>=0", "other; python_version < '3'"]


@pytest.fixture(autouse=True)
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "DISK_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "DISK_CHUNK", 1 << 18)
    yield


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_the_report(hub: Hub, kvq_main: Kvq, tmp_path: Path) -> None:
    said = kvq_main("doctor", "--disk", tmp_path, "--json")
    report = json.loads(said.out)
    assert said.code == 0 and said.err == "" and report["schema"] == "kvq.doctor/1" and report["passed"]
    found = {row["name"]: row for row in report["findings"]}
    assert found["torch"]["found"] == version("torch") and found["Python"]["status"] == "ok"
    assert found["Hub"]["found"] == f"{hub.url} answers, logged in as somebody"
    assert "MB/s" in found["disk speed"]["found"] and "GB free" in found["disk space"]["found"]
    assert {"host memory", "sglang", "vllm"} <= found.keys() and any(name.startswith("GPU") for name in found)
    assert hub.token not in said.out and list(tmp_path.iterdir()) == []
    said = kvq_main("doctor", "--disk", tmp_path, "--offline")
    assert said.code == 0 and "not asked" in said.out and len(hub.asked) == 1


def test_packages_out_of_range(monkeypatch: pytest.MonkeyPatch, kvq_main: Kvq, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "requires", lambda name: RANGES)
    found = by_name(list(check_packages()))
    assert {name: row.status for name, row in found.items()} == {
        "torch": "ok", "transformers": "bad", "no-such-package": "bad", "typer": "ok",
    }  # fmt: skip
    assert found["transformers"].remedy == "kvq needs <0.1" and found["no-such-package"].found == "missing"
    said = kvq_main("doctor", "--offline", "--disk", tmp_path)
    assert said.code == 5 and said.err.count("\n") == 1
    assert "this machine is not fit: transformers: " in said.err and "pip install 'no-such-package>=1'" in said.err


def test_a_source_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machine, "requires", missing)
    assert [row.status for row in check_packages()] == ["note"]


@pytest.mark.parametrize(("found", "status"), [((3, 10), "bad"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "bad")])
def test_python(monkeypatch: pytest.MonkeyPatch, found: tuple[int, int], status: str) -> None:
    monkeypatch.setattr(sys, "version_info", (*found, 0, "final", 0))
    assert check_python().status == status


def test_pythons_are_those_of_the_package() -> None:
    (first, last), text = machine.PYTHONS, (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"' in text


def test_the_disk_is_measured_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def slow(file: int) -> None:
        real(file)
        time.sleep(0.05)

    monkeypatch.setattr(os, "fsync", slow)
    started = time.perf_counter()
    found = by_name(list(check_disk(tmp_path, limit=1 << 25, seconds=0.1)))
    assert time.perf_counter() - started < 3 and list(tmp_path.iterdir()) == []
    speed = float(found["disk speed"].found.split()[1])
    assert speed < (1 << 18) / 0.05 / 1e6 and found["disk speed"].status == "note"


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    (found,) = check_disk(tmp_path / "missing")
    assert found.status == "bad" and "No such file" in found.found


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))
    (found,) = check_disk(tmp_path)
    assert found.status == "bad" and "0.0 GB free" in found.found and "--disk" in found.remedy


def test_a_hub_that_is_not_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    found = check_hub()
    assert found.status == "note" and found.found.startswith("not reached: ")


def test_a_hub_without_and_with_a_bad_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    hub.echoes_token = True
    found = check_hub()
    assert found.status == "note" and "401" in found.found and "hf_expired" not in found.found
    monkeypatch.setenv("HF_TOKEN", "")
    found = check_hub()
    assert (found.status, found.remedy) == ("note", "hf auth login") and "no token" in found.found


@pytest.mark.parametrize(
    ("last", "status", "words"), [("99", "ok", "serve with --x"), ("0.0.2", "note", "as read in 0.0.1 to 0.0.2")]
)
def test_an_engine_that_is_here(last: str, status: str, words: str) -> None:
    found = check_engine(Engine("typer", "0.0.1", last, ("--x",)))
    assert found.status == status and words in found.found and version("typer") in found.found


def test_an_engine_that_is_not_here_or_unknown() -> None:
    assert "not installed" in check_engine(Engine("no_such_engine", None, None, ())).found
    assert "name no version" in check_engine(Engine("typer", None, None, ())).found


def test_version_names_the_dependencies(kvq_main: Kvq) -> None:
    lines = kvq_main("--version").out.splitlines()
    assert lines[0].startswith("kvq ") and lines[1].startswith("python 3.")
    assert f"torch {version('torch')}" in lines and f"transformers {version('transformers')}" in lines
    assert not any("missing" in line for line in lines)

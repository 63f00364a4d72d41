"""Small parts of the long runs (`make soak`, `make fuzz`), each in a process of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import fresh_environment

ROOT = Path(__file__).parent.parent
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the shim is compiled with cc")


def report_of(module: str, *arguments: object) -> dict[str, Any]:
    """What the module prints when nothing is wrong."""
    environment = {**fresh_environment(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    report: dict[str, Any] = json.loads(ended.stdout)
    return report


@needs_compiler
def test_killed_anywhere_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    report = report_of("tests.faults.soak", "--points", 100, "--seed", 1, "--scratch", tmp_path)
    assert report["points"] == 100 and report["chains compared"] >= 20
    assert min(report["by kind of run"].values()) > 5
    kinds = {place.split()[0] for place in report["by place"]}
    assert {"write", "rename", "fsync", "read", "moment:"} <= kinds


@needs_compiler
def test_hindered_anyhow_a_run_says_so_and_goes_on_after_repair(tmp_path: Path) -> None:
    report = report_of("tests.faults.hindrances", "--trials", 28, "--seed", 1, "--scratch", tmp_path)
    codes = report["exit codes"]
    for kind in ("full_disk", "broken_output", "read_only_output"):
        assert set(codes[kind]) == {"7"}, codes
    assert "3" in codes["broken_source"] and "3" in codes["changing_source"], codes
    assert set(codes["jumping_clock"]) == {"0"}, codes


def test_hostile_files_are_refused_in_one_sentence() -> None:
    report = report_of("tests.fuzz.run", "--inputs", 4000, "--seed", 1)
    assert report["inputs"] >= 4000
    for row in report["targets"]:
        assert 0 < row["refused"] < row["inputs"], row  # some are accepted, or the target never gets past its door

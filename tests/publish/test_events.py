"""The event log of real runs against the tables of docs/events.md."""

import json
import os
import re
import signal
from datetime import datetime
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

import kvq
from kvq.console import RunProgress
from kvq.errors import OutputError
from kvq.publish import coverage
from kvq.publish.events import EventLog, open_events
from tests.conftest import Kvq
from tests.runs import SETTINGS, Shared, manifest_of

DOCS = Path(kvq.__file__).parent.parent / "docs" / "events.md"
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "list": (list,),
    "object": (dict,),
    "null": (type(None),),
}
Row = dict[str, Any]


def documented() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Fields of every line, and of each event, with their types."""
    common: dict[str, str] = {}
    events: dict[str, dict[str, str]] = {}
    for line in DOCS.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| `(\w+)` \| `(\w+)` \| ([\w ]+) \|", line):
            events.setdefault(found[1], {})[found[2]] = found[3]
        elif found := re.match(r"\| `(\w+)` \| ([\w ]+) \|", line):
            common[found[1]] = found[2]
    return common, events


def read(path: Path) -> list[Row]:
    """All lines, each held to the tables."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    common, events = documented()
    for number, row in enumerate(rows):
        fields = common | events[row["event"]]
        assert row.keys() == fields.keys(), row["event"]
        for name, kind in fields.items():
            allowed = tuple(found for word in kind.split(" or ") for found in TYPES[word])
            assert isinstance(row[name], allowed) and not isinstance(row[name], bool), (row["event"], name)
        assert (row["version"], row["sequence"]) == (1, number) and row["time"].endswith("Z")
    times = [datetime.fromisoformat(row["time"]) for row in rows]
    assert times == sorted(times)
    return rows


def names(rows: list[Row]) -> list[str]:
    return [row["event"] for row in rows if row["event"] != "stage"]


@pytest.fixture
def arguments(shared: Shared, tmp_path: Path) -> list[object]:
    settings = [f"--set={setting}" for setting in (*SETTINGS, "solver=rtn")]
    return ["quantize", shared.source("kimi-k2"), *settings, "--out", tmp_path / "out", "--events", tmp_path / "log"]


def test_a_run(kvq_main: Kvq, arguments: list[object], tmp_path: Path) -> None:
    assert kvq_main(*arguments).code == 0
    rows = read(tmp_path / "log")
    assert names(rows) == ["run_started", "source_wanted", "planned", *["layer_finished"] * 3, "run_finished"]
    assert {row["stage"] for row in rows if row["event"] == "stage"} >= {"writing embeddings and head", "writing"}
    manifest = manifest_of(tmp_path / "out")
    assert rows[-1]["summary"] == manifest["summary"] and rows[2]["recipe_sha256"] == manifest["recipe_sha256"]


def test_every_event_is_tested() -> None:
    seen = "run_started source_wanted planned stage layer_finished run_finished run_stopped run_failed"
    assert list(documented()[1]) == seen.split()


def test_a_stop_and_what_goes_on(
    kvq_main: Kvq, arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: RunProgress, layer: int, num_layers: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "layer_done", stop)
        assert kvq_main(*arguments).code == 143
    rows = read(tmp_path / "log")
    assert names(rows)[-2:] == ["layer_finished", "run_stopped"]
    assert (rows[-1]["exit_code"], rows[-1]["signal"]) == (143, "SIGTERM")
    with (tmp_path / "log").open("a") as file:
        file.write('{"version": 1, "sequence": 99, "cut of')  # as a kill leaves it
    assert kvq_main(*arguments).code == 0
    rows = read(tmp_path / "log")
    assert [row["layer"] for row in rows if row["event"] == "layer_finished"] == [0, 1, 2]
    assert names(rows).count("run_started") == 2 and rows[-1]["event"] == "run_finished"


def test_a_refusal(kvq_main: Kvq, arguments: list[object], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "something").touch()
    said = kvq_main(*arguments)
    last = read(tmp_path / "log")[-1]
    assert (last["event"], last["exit_code"], last["error"]) == ("run_failed", said.code, "OutputError")
    assert said.err.strip().endswith(last["message"])


def test_a_mistake_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_events(tmp_path / "log", "quantize"):
        raise ZeroDivisionError("oops")
    with pytest.raises(KeyboardInterrupt), open_events(tmp_path / "log", "quantize"):
        raise KeyboardInterrupt
    rows = read(tmp_path / "log")
    assert [(row["event"], row.get("exit_code")) for row in rows if "exit_code" in row] == [
        ("run_failed", 1), ("run_stopped", 130),
    ]  # fmt: skip


def test_a_dry_run_leaves_no_log(kvq_main: Kvq, arguments: list[object], tmp_path: Path) -> None:
    assert kvq_main(*arguments, "--dry-run").code == 0
    assert not (tmp_path / "log").exists()


LONG = (1 << 20) + 5  # more than is read of a log


@pytest.mark.parametrize("content", [
    b"something else\n", b'{"a": 1}\n', b"no end of line", b"[1]\n", b"x" * LONG, b"x\n" * LONG + b"rest",
    b'{"version": 1, "sequence": 1}\n{"a": 1', b"x" * LONG + b'\n{"version": 1, "sequence": 1}\n',
    b'{"version": 1, "sequence": 1}\n' + b"x" * LONG, b'{"version": 1, "a": [\n1]\n',
])  # fmt: skip
def test_a_file_of_another_kind_is_not_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(OutputError, match="exists and is no event log"):
        EventLog(path)
    assert path.read_bytes() == content


def test_only_a_cut_off_first_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"version": 1, "seq')
    log = EventLog(path)
    log.emit("run_failed", exit_code=1, error="X", message="m")
    log.close()
    assert read(path)[0]["sequence"] == 0


@pytest.mark.parametrize("place", ["missing/log", "."])
def test_a_place_that_cannot_be_written(kvq_main: Kvq, shared: Shared, tmp_path: Path, place: str) -> None:
    said = kvq_main("quantize", shared.source("kimi-k2"), "--events", tmp_path / place, "--out", tmp_path / "out")
    assert said.code == 7 and "--events" in said.err and "cannot be written" in said.err


def test_a_full_disk_names_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog(Path("/dev/full"))
    with pytest.raises(OutputError, match=r"--events /dev/full: cannot be written \(No space left"):
        log.emit("run_failed", exit_code=1, error="X", message="m")


def test_a_line_is_on_disk_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    log = EventLog(tmp_path / "log")
    log.emit("run_failed", exit_code=1, error="X", message="m")
    assert len(synced) == 1 and len(read(tmp_path / "log")) == 1


@pytest.mark.parametrize("place", ["source/log", "out/log", "out/deeper/log"])
def test_a_log_is_no_part_of_a_checkpoint(kvq_main: Kvq, shared: Shared, tmp_path: Path, place: str) -> None:
    copytree(shared.source("kimi-k2"), tmp_path / "source")
    events = tmp_path / place
    events.parent.mkdir(parents=True, exist_ok=True)
    said = kvq_main("quantize", tmp_path / "source", "--w", "int4-rtn", "--out", tmp_path / "out", "--events", events)
    name = "source" if place.startswith("source") else "output"
    assert said.code == 7 and f"--events {events}: lies inside the {name} " in said.err
    assert not events.exists()


def test_a_signal_when_the_output_is_whole_changes_nothing(
    kvq_main: Kvq, arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command could not run again: its output is there."""

    def stop(folder: Path) -> None:
        assert (folder / "kvq-manifest.json").is_file()
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(coverage, "write_coverage", stop)
        assert kvq_main(*arguments).code == 0
    assert names(read(tmp_path / "log"))[-1] == "run_finished"
    again = kvq_main(*arguments)
    assert again.code == 7 and f"A run has finished there: kvq verify {tmp_path / 'out'}." in again.err

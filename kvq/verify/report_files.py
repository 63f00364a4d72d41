"""Measurements beside a checkpoint: `<checkpoint>/kvq-reports/<name>.json`. docs/reports.md has their fields."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq import __version__
from kvq.checkpoint.index import load_json
from kvq.errors import CheckpointError, OutputError

REPORTS = "kvq-reports"


def report_folder(checkpoint: Path) -> Path:
    return checkpoint / REPORTS


def write_report(folder: Path, name: str, kind: str, content: Mapping[str, Any]) -> Path:
    """Write `<folder>/<name>.json` at once, with its schema and kvq's version first. Raises OutputError."""
    path = folder / f"{name}.json"
    whole = {"schema": f"kvq.{kind}/1", "kvq_version": __version__, **content}
    partial = path.with_name(path.name + ".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}). Give another place with --report.") from None
    return path


def read_report(folder: Path, name: str, kind: str) -> dict[str, Any] | None:
    """A report of this kind, None where there is none. Raises CheckpointError for one of another schema."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    content = load_json(path)
    if content.get("schema") != f"kvq.{kind}/1":
        raise CheckpointError(f"{path}: its schema is {content.get('schema')!r}, expected kvq.{kind}/1. Measure again.")
    return content


def read_tasks(folder: Path) -> dict[str, Any]:
    """The rows of all `tasks-*.json` reports together: task -> what was measured."""
    rows: dict[str, Any] = {}
    for path in sorted(folder.glob("tasks-*.json")):
        content = read_report(folder, path.stem, "tasks")
        if content is not None and isinstance(content.get("tasks"), dict):
            rows.update(content["tasks"])
    return rows

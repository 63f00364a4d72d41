"""Measurements beside a checkpoint, `<checkpoint>/kvq-reports/<name>.json`, written whole or not at all.

docs/reports.md has their fields, `report_file.py` reads them.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq import __version__
from kvq.checkpoint.index import MANIFEST_NAME, load_json
from kvq.checkpoint.index import REPORTS as REPORTS
from kvq.checkpoint.writer import dump_json
from kvq.errors import OutputError

DISTANCE, DAMAGE, KV, COVERAGE = "kvq.distance/1", "kvq.damage/1", "kvq.kv/1", "kvq.coverage/1"
TASKS, TOOL_CALLS = "kvq.tasks/1", "kvq.toolcalls/1"
HEAD = ("schema", "kvq_version", "checkpoint_sha256")


def report_folder(checkpoint: Path) -> Path:
    return checkpoint / REPORTS


def write_report(reports: Path, name: str, schema: str, checkpoint: Path, body: Mapping[str, Any]) -> Path:
    """Write `<reports>/<name>.json` about a checkpoint and give its path. Raises OutputError."""
    path = reports / f"{name}.json"
    head = dict(zip(HEAD, (schema, __version__, checkpoint_identity(checkpoint)), strict=True))
    write_json(path, {**head, **body})
    return path


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_whole(path, dump_json(document))


def write_whole(path: Path, text: str) -> None:
    """A reader never sees half of it. Raises OutputError."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}). Make room, or choose another place."
        ) from None


def checkpoint_identity(folder: Path) -> str | None:
    """One hash over the weight files of a manifest, so that a report cannot be taken for another checkpoint's.

    None where kvq did not make the folder. Raises CheckpointError for a manifest that is no JSON.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    files = load_json(path).get("files")
    weights = sorted(f"{name} {digest}" for name, digest in (files or {}).items() if name.endswith(".safetensors"))
    return hashlib.sha256("\n".join(weights).encode()).hexdigest()

"""Report files beside a checkpoint: `kvq-reports/*.json`, written whole or not at all, and read with suspicion."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq import __version__
from kvq.checkpoint.index import MANIFEST_NAME, load_json
from kvq.checkpoint.writer import dump_json
from kvq.errors import OutputError, VerificationError

FOLDER = "kvq-reports"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Raises OutputError. A reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(dump_json(document), encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error}).") from None


def write_report(folder: Path, name: str, schema: str, body: Mapping[str, Any]) -> Path:
    """Write `<folder>/kvq-reports/<name>.json` and give its path."""
    path = folder / FOLDER / f"{name}.json"
    head = {"schema": schema, "kvq_version": __version__, "checkpoint_sha256": checkpoint_identity(folder)}
    write_json(path, {**head, **body})
    return path


def require(value: Any, schema: str | None, path: Path, what: str = "the file") -> Mapping[str, Any]:
    """An object, of this schema if one is named. Raises VerificationError."""
    if not isinstance(value, Mapping):
        raise VerificationError(f"{path}: {what} is not a JSON object; measure again with this kvq.")
    if schema is not None and value.get("schema") != schema:
        raise VerificationError(
            f"{path}: its schema is {str(value.get('schema'))[:40]!r}, this kvq reads {schema!r}; measure again."
        )
    return value


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

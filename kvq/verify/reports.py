"""Report files beside a checkpoint: `kvq-reports/*.json`, written whole or not at all, and read with suspicion."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq import __version__
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
    write_json(path, {"schema": schema, "kvq_version": __version__, **body})
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


def number(value: Any) -> float:
    """A finite number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} is not a finite number")
    return float(value)

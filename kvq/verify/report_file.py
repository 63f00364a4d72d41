"""A report file as its readers see it: every step into it is checked, and a mistake names the file and the place."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.checkpoint.index import load_json
from kvq.errors import VerificationError
from kvq.verify.report_files import checkpoint_identity


@dataclass(frozen=True, slots=True)
class ReportFile:
    """A JSON object of a report. `place` says where in the file it lies. All methods raise VerificationError."""

    path: Path
    value: Any
    place: str = ""

    def at(self, *keys: str) -> "ReportFile":
        """The object or value below these keys, which must be there."""
        found = self
        for key in keys:
            if not isinstance(found.value, Mapping) or key not in found.value:
                raise found.error(f"lacks {found._name(key)}")
            found = ReportFile(found.path, found.value[key], found._name(key))
        return found

    def number(self, *keys: str) -> float | None:
        """A finite number; None for null, which says that it could not be had."""
        found = self.at(*keys)
        value = found.value
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise found.error(f"{found.place} is {str(value)[:40]!r}, not a finite number")
        return float(value)

    def count(self, *keys: str) -> int:
        """A whole number of things."""
        found = self.at(*keys)
        if isinstance(found.value, bool) or not isinstance(found.value, int) or found.value < 0:
            raise found.error(f"{found.place} is {str(found.value)[:40]!r}, not a count")
        return found.value

    def text(self, *keys: str) -> str:
        found = self.at(*keys)
        if not isinstance(found.value, str):
            raise found.error(f"{found.place} is {str(found.value)[:40]!r}, not text")
        return found.value

    def items(self, *keys: str) -> Iterator[tuple[str, "ReportFile"]]:
        """Members of an object, by name, in the order of the file."""
        found = self.at(*keys)
        if not isinstance(found.value, Mapping):
            raise found.error(f"{found.place or 'it'} is not an object")
        for key in found.value:
            yield key, found.at(key)

    def rows(self, *keys: str) -> list["ReportFile"]:
        """Members of a list."""
        found = self.at(*keys)
        if not isinstance(found.value, list):
            raise found.error(f"{found.place} is not a list")
        return [ReportFile(found.path, one, f"{found.place}[{number}]") for number, one in enumerate(found.value)]

    def expect_schema(self, schema: str) -> "ReportFile":
        """This report, which must be of this schema."""
        found = self.text("schema")
        if found != schema:
            raise self.error(f"its schema is {found[:40]!r}, this kvq reads {schema!r}")
        return self

    def expect_weights_of(self, checkpoint: Path) -> "ReportFile":
        """This report, which must have been measured on the weights that lie there."""
        if self.at("checkpoint_sha256").value != checkpoint_identity(checkpoint):
            raise self.error("it was measured on other weights than those that lie here")
        return self

    def error(self, what: str) -> VerificationError:
        return VerificationError(f"{self.path}: {what}. Measure again with this kvq, or remove the file.")

    def _name(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


def find_report(reports: Path, name: str, schema: str) -> ReportFile | None:
    """`<reports>/<name>.json`, None if it was not measured. Raises CheckpointError for no JSON, VerificationError."""
    path = reports / f"{name}.json"
    return ReportFile(path, load_json(path)).expect_schema(schema) if path.is_file() else None


def find_tasks(reports: Path, schema: str) -> list[ReportFile]:
    """All `tasks-*.json`, by name."""
    found = (find_report(reports, path.stem, schema) for path in sorted(reports.glob("tasks-*.json")))
    return [report for report in found if report is not None]


def require(value: Any, schema: str | None, path: Path, what: str = "the file") -> Mapping[str, Any]:
    """An object, of this schema if one is named. Raises VerificationError."""
    found = ReportFile(path, value)
    if not isinstance(value, Mapping):
        raise found.error(f"{what} is not a JSON object")
    if schema is not None:
        found.expect_schema(schema)
    return value

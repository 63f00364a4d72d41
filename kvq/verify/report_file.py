"""A report file as its readers see it: every step into it is checked, and a mistake names the file and the place."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.checkpoint.index import load_json
from kvq.errors import VerificationError
from kvq.verify.answer_reports import FOLDER


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

    def error(self, what: str) -> VerificationError:
        return VerificationError(f"{self.path}: {what}. Measure again with this kvq, or remove the file.")

    def _name(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


def find_report(folder: Path, name: str, schema: str) -> ReportFile | None:
    """`kvq-reports/<name>.json`, None if it was not measured. Raises CheckpointError for no JSON, VerificationError."""
    path = folder / FOLDER / f"{name}.json"
    if not path.is_file():
        return None
    report = ReportFile(path, load_json(path))
    found = report.text("schema")
    if found != schema:
        raise report.error(f"its schema is {found[:40]!r}, this kvq reads {schema!r}")
    return report

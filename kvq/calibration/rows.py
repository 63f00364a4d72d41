"""Where calibration and evaluation rows come from: JSON lines, Parquet, plain text, a folder of these, the Hub.

A row has `text`, `messages` (with optional `tools`) or `input_ids`. Rows are read as they are needed and each carries
its own place, so that an error names the line of the file and not the count of rows before it.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Self

from kvq.calibration import tables_door
from kvq.errors import CalibrationError, RecipeError

HUB_PREFIX = "hf://datasets/"
HUB_PLACE = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(@(?P<revision>[\w.-]+))?(:(?P<split>[^:/@]+))?"
)
ROLES = ("system", "developer", "user", "assistant", "tool")
KINDS = {"text": str, "messages": list, "input_ids": list}
COLUMNS = (*KINDS, "tools")
PLAIN_TEXT = (".txt", ".md", ".rst", ".py")
IN_FOLDERS = (".jsonl", ".ndjson", ".parquet", *PLAIN_TEXT)
TEXT_CHUNK = 2**16


class Row(NamedTuple):
    """`place` is what an error about the row begins with: file and line, or table and number of the row."""

    place: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HubDataset:
    """`hf://datasets/OWNER/NAME[/CONFIG][@REVISION][:SPLIT]`; SPLIT as `datasets` takes it, by default `train`."""

    repo: str
    config: str | None = None
    revision: str | None = None
    split: str = "train"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises RecipeError for anything else."""
        match = HUB_PLACE.fullmatch(text.removeprefix(HUB_PREFIX))
        if match is None or not text.startswith(HUB_PREFIX):
            raise RecipeError(f"{text}: expected {HUB_PREFIX}OWNER/NAME[/CONFIG][@REVISION][:SPLIT].")
        return cls(match["repo"], match["config"], match["revision"], match["split"] or "train")

    @property
    def name(self) -> str:
        return str(self)

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{HUB_PREFIX}{self.repo}{config}{revision}:{self.split}"


Place = Path | HubDataset


def data_place(text: str) -> Place:
    """What a flag names: `hf://...` or a path. Raises RecipeError for another scheme."""
    if "://" in text:
        return HubDataset.parse(text)
    return Path(text)


def iter_rows(place: Place | None) -> Iterator[Row]:
    """Rows in the order of the data; the set that ships with kvq for None. Raises CalibrationError with the row."""
    if isinstance(place, HubDataset):
        yield from _table_rows(str(place), tables_door.hub_rows(place.repo, place.config, place.revision, place.split))
    elif place is None:
        yield from _json_lines(resources.files("kvq.calibration") / "data" / "default.jsonl")
    elif place.is_dir():
        yield from _folder_rows(place)
    else:
        yield from _file_rows(place)


def _folder_rows(folder: Path) -> Iterator[Row]:
    """Its files by name, one after the other."""
    files = sorted(path for path in folder.iterdir() if path.suffix in IN_FOLDERS)
    if not files:
        raise CalibrationError(
            f"{folder}: cannot be read: the folder holds no file that ends in {', '.join(IN_FOLDERS)}."
        )
    for file in files:
        yield from _file_rows(file)


def _file_rows(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        return _table_rows(str(file), tables_door.parquet_rows(file, COLUMNS))
    return _plain_text(file) if file.suffix in PLAIN_TEXT else _json_lines(file)


def _read_text(place: Any) -> str:
    try:
        text: str = place.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{place}: cannot be read ({error}). Give a JSON-lines file in UTF-8 with `text` rows."
        ) from None
    return text


def _json_lines(place: Any) -> Iterator[Row]:
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it takes for the end of a line.
    for number, line in enumerate(_read_text(place).split("\n"), start=1):
        if line.strip():
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CalibrationError(f"{place}:{number}: {_no_json(error)}. Mend or remove this line.") from None
            yield _checked(f"{place}:{number}", values)


def _plain_text(file: Path) -> Iterator[Row]:
    """Rows of whole lines, at least 64 Ki characters each but the last, so that no row is read that is not needed."""
    lines: list[str] = []
    start, length = 1, 0
    for number, line in enumerate(_read_text(file).splitlines(keepends=True), start=1):
        lines.append(line)
        length += len(line)
        if length >= TEXT_CHUNK:
            yield Row(f"{file}:{start}", {"text": "".join(lines)})
            lines, start, length = [], number + 1, 0
    if "".join(lines).strip():
        yield Row(f"{file}:{start}", {"text": "".join(lines)})


def _table_rows(place: str, rows: Iterator[dict[str, Any]]) -> Iterator[Row]:
    """Tables give every row the keys of all others, with null for what a row does not have."""
    for number, values in enumerate(rows, start=1):
        kept = {key: _without_nulls(value) for key, value in values.items() if key in COLUMNS and value is not None}
        if not kept:
            raise CalibrationError(
                f"{place}, row {number}: none of the columns {', '.join(KINDS)}; it has {', '.join(values)[:200]}."
            )
        yield _checked(f"{place}, row {number}", kept)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _checked(place: str, values: Any) -> Row:
    if not isinstance(values, dict) or not any(isinstance(values.get(key), kind) for key, kind in KINDS.items()):
        raise CalibrationError(f"{place}: a row needs `text` (string), `messages` (list) or `input_ids` (list).")
    for message in values["messages"] if isinstance(values.get("messages"), list) else ():
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise CalibrationError(
                f"{place}: each message needs a `role` of {', '.join(ROLES)}; chat templates leave out others "
                f"without a word (found {str(message)[:80]})."
            )
        if not isinstance(message.get("content"), str | list | None):
            raise CalibrationError(
                f"{place}: the `content` of a message must be text or a list of parts; a chat template writes anything "
                f"else as Python prints it (found {str(message['content'])[:80]})."
            )
    return Row(place, {**values, "tools": _tools(place, values["tools"])} if values.get("tools") else values)


def _no_json(error: Exception) -> str:
    """Python's own words, but for limits of its reader: they name its functions, and the text may be fine."""
    if isinstance(error, RecursionError):
        return "JSON that is nested too deeply"
    return f"not valid JSON ({error})" if isinstance(error, json.JSONDecodeError) else "JSON with too long a number"


def _tools(place: str, tools: Any) -> list[Any]:
    """Many published sets keep the tools of a row as JSON text, since their fields differ from row to row."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{place}: `tools` is text but {_no_json(error)}. Mend or remove the row.") from None
    if not isinstance(tools, list):
        raise CalibrationError(f"{place}: `tools` must be a list (found {str(tools)[:80]}).")
    return tools

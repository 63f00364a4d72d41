"""Questions with a known answer from JSON lines.

Two kinds of row, `id` optional in both:

    {"tools": [...], "user": "..." or "messages": [...], "call": {"name", "arguments"} or null, or "calls": [...]}
    {"q": "...", "cot": "...", "ans": 12}

A tool-call row without `call` and `calls` has no reference: it counts for what two models do, not for what is right.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvq.checkpoint.untrusted import parse_json
from kvq.errors import CalibrationError
from kvq.verify.toolcalls.calls import ToolCall
from kvq.verify.toolcalls.tools import openai_tools

Kind = Literal["tool-calls", "arithmetic"]


@dataclass(frozen=True, slots=True)
class Question:
    """`calls` is None where a row names no reference; `number` is set for arithmetic only."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    calls: tuple[ToolCall, ...] | None = None
    number: float | None = None


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """`sha256` is of the file; `num_rows` counts all rows, also those past a limit."""

    name: str
    kind: Kind
    sha256: str
    num_rows: int
    questions: tuple[Question, ...]


def load_questions(path: Path, limit: int | None = None) -> QuestionFile:
    """All rows of one kind. Raises CalibrationError with the line."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: cannot be read ({error}). Give a JSON-lines file in UTF-8.") from None
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not numbered:
        raise CalibrationError(f"{path}: holds no rows.")
    rows = [(f"{path}:{number}", _object(f"{path}:{number}", line)) for number, line in numbered]
    kind: Kind = "tool-calls" if "tools" in rows[0][1] else "arithmetic"
    read = _tool_question if kind == "tool-calls" else _arithmetic_question
    questions = [read(row, place, number) for number, (place, row) in enumerate(rows, start=1)]
    ids = [question.id for question in questions]
    if len(set(ids)) != len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise CalibrationError(f"{path}: two rows have the id {twice!r}.")
    digest = hashlib.sha256(data).hexdigest()
    return QuestionFile(path.name, kind, digest, len(questions), tuple(questions[:limit]))


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        row = parse_json(line.encode())
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{place}: not valid JSON ({error}).") from None
    if not isinstance(row, dict):
        raise CalibrationError(f"{place}: a row is a JSON object.")
    return row


def _identity(row: Mapping[str, Any], number: int) -> str:
    return str(row.get("id", f"row {number}"))[:80]


def _arithmetic_question(row: Mapping[str, Any], place: str, number: int) -> Question:
    question, answer = row.get("q"), row.get("ans")
    if not isinstance(question, str) or isinstance(answer, bool) or not isinstance(answer, int | float):
        raise CalibrationError(f"{place}: needs `q` (string) and `ans` (number), or `tools` like the rows before it.")
    return Question(_identity(row, number), [{"role": "user", "content": question}], number=float(answer))


def _tool_question(row: Mapping[str, Any], place: str, number: int) -> Question:
    tools, user, messages = row.get("tools"), row.get("user"), row.get("messages")
    if not isinstance(tools, list):
        raise CalibrationError(f"{place}: needs `tools` (list), like the rows before it.")
    if isinstance(user, str):
        messages = [{"role": "user", "content": user}]
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise CalibrationError(f"{place}: needs `user` (string) or `messages` (list of objects with a `role`).")
    return Question(_identity(row, number), messages, openai_tools(tools, place), _reference(row, place))


def _reference(row: Mapping[str, Any], place: str) -> tuple[ToolCall, ...] | None:
    """The calls that a row wants: none at all for `"call": null` and `"calls": []`."""
    if "calls" in row:
        wanted = row["calls"]
    elif "call" in row:
        wanted = [] if row["call"] is None else [row["call"]]
    else:
        return None
    if not isinstance(wanted, list):
        raise CalibrationError(f"{place}: `calls` must be a list.")
    calls = []
    for call in wanted:
        name, arguments = (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise CalibrationError(f"{place}: a call needs `name` (string) and `arguments` (object).")
        calls.append(ToolCall(name, arguments))
    return tuple(calls)

"""Rows of question files: both kinds, and what is refused with its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import CalibrationError
from kvq.verify.questions import load_questions
from kvq.verify.toolcalls.calls import ToolCall

TOOLS = [{"name": "set_timer", "parameters": ["minutes"]}]
CALL = {"name": "set_timer", "arguments": {"minutes": 5}}


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_arithmetic_rows(tmp_path: Path) -> None:
    file = load_questions(write(tmp_path, {"q": "2+2?", "cot": "", "ans": 4}, "", {"q": "1/2?", "ans": 0.5, "id": "b"}))
    assert (file.kind, file.name, file.num_rows) == ("arithmetic", "rows.jsonl", 2)
    assert [(one.id, one.number) for one in file.questions] == [("row 1", 4.0), ("b", 0.5)]
    assert file.questions[0].messages == [{"role": "user", "content": "2+2?"}]


@pytest.mark.parametrize(
    ("extra", "calls"),
    [
        ({"call": CALL}, (ToolCall("set_timer", {"minutes": 5}),)),
        ({"calls": [CALL, CALL]}, (ToolCall("set_timer", {"minutes": 5}),) * 2),
        ({"call": None}, ()),
        ({"calls": []}, ()),
        ({}, None),
    ],
)
def test_tool_rows(tmp_path: Path, extra: dict[str, Any], calls: tuple[ToolCall, ...] | None) -> None:
    file = load_questions(write(tmp_path, {"tools": TOOLS, "user": "Five minutes.", **extra}))
    assert file.kind == "tool-calls" and file.questions[0].calls == calls
    assert file.questions[0].tools[0]["function"]["parameters"]["required"] == ["minutes"]


def test_messages_and_limit(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    file = load_questions(write(tmp_path, *[{"tools": [], "messages": messages}] * 3), limit=2)
    assert len(file.questions) == 2 and file.num_rows == 3 and file.questions[1].messages == messages


def test_the_hash_is_of_the_file(tmp_path: Path) -> None:
    one = load_questions(write(tmp_path, {"q": "x", "ans": 1})).sha256
    two = load_questions(write(tmp_path, {"q": "x", "ans": 2})).sha256
    assert one != two and len(one) == 64


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ((), "holds no rows"),
        (("{",), "rows.jsonl:1: not valid JSON"),
        (('{"q": "x", "ans": NaN}',), "rows.jsonl:1: not valid JSON"),
        (("[" * 100_000,), "rows.jsonl:1: not valid JSON"),
        (("[1]",), "a row is a JSON object"),
        (({"q": "x"},), "rows.jsonl:1: needs `q` \\(string\\) and `ans`"),
        (({"q": "x", "ans": True},), "needs `q`"),
        (({"q": "x", "ans": 1}, {"tools": TOOLS, "user": "x"}), "rows.jsonl:2: needs `q`"),
        (({"tools": TOOLS, "user": "x"}, {"q": "x", "ans": 1}), "rows.jsonl:2: needs `tools`"),
        (({"tools": TOOLS},), "needs `user`"),
        (({"tools": TOOLS, "messages": ["x"]},), "needs `user`"),
        (({"tools": TOOLS, "user": "x", "call": {"name": "f"}},), "a call needs `name`"),
        (({"tools": TOOLS, "user": "x", "calls": 1},), "`calls` must be a list"),
        (({"q": "x", "ans": 1, "id": 7}, {"q": "y", "ans": 1, "id": "7"}), "two rows have the id '7'"),
    ],
)
def test_refused(tmp_path: Path, rows: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(CalibrationError, match=reason):
        load_questions(write(tmp_path, *rows))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_questions(tmp_path / "nothing.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"q": "caf\xe9", "ans": 1}')
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_questions(tmp_path / "latin.jsonl")

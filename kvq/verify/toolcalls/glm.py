"""Tool calls in the text of GLM-4.5 to GLM-5.2, as their chat templates write them.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

GLM-4.7 and later leave out the line breaks. A value is plain text for a string and JSON for everything else; which of
the two it is, only the tool's schema says.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvq.checkpoint.untrusted import parse_json
from kvq.verify.toolcalls.calls import MalformedError, ParsedAnswer, ToolCall, split_reasoning
from kvq.verify.toolcalls.tools import parameter_types

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
MARKS = (CALL_END, KEY, KEY_END, VALUE, VALUE_END)
NAME = re.compile(r"[\w.\-]+")
JSON_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def parse_glm(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
    """Every call in an answer. Pure; never raises."""
    _, answer = split_reasoning(text)
    content: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    at, number, whole = 0, 0, True
    while True:
        start = answer.find(CALL, at)
        if whole:  # what follows a broken call is neither content nor a second problem
            content.append(answer[at : start if start >= 0 else None])
            problems += [f"{mark} stands outside of a call" for mark in MARKS if mark in content[-1]]
        if start < 0:
            return ParsedAnswer("".join(content).strip(), tuple(calls), tuple(problems))
        number += 1
        try:
            call, at = _call(answer, start + len(CALL), tools)
        except MalformedError as error:
            problems.append(f"call {number}: {error}")
            at, whole = start + len(CALL), False
        else:
            calls.append(call)
            whole = True


def _call(text: str, start: int, tools: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, int]:
    """The call whose name starts here, and where it ends."""
    ends = [found for mark in (KEY, CALL_END, CALL) if (found := text.find(mark, start)) >= 0]
    if not ends:
        raise MalformedError("it is cut off")
    name, at = text[start : min(ends)].strip(), min(ends)
    if not NAME.fullmatch(name):
        raise MalformedError(f"{name[:40]!r} is not a name")
    types = parameter_types(tools, name)
    arguments: dict[str, Any] = {}
    while not text.startswith(CALL_END, at):
        key, at = _field(text, at, KEY, KEY_END)
        raw, at = _field(text, _after_space(text, at), VALUE, VALUE_END)
        if key in arguments:
            raise MalformedError(f"the argument {key[:40]!r} appears twice")
        arguments[key] = typed_value(raw, types.get(key, frozenset()))
        at = _after_space(text, at)
    return ToolCall(name, arguments), at + len(CALL_END)


def _field(text: str, at: int, mark: str, end_mark: str) -> tuple[str, int]:
    if not text.startswith(mark, at):
        if mark.startswith(text[at:]) or CALL_END.startswith(text[at:]):
            raise MalformedError("it is cut off")
        raise MalformedError(f"{text[at : at + 40]!r} stands where {mark} belongs")
    end = text.find(end_mark, at)
    if end < 0:
        raise MalformedError("it is cut off")
    return text[at + len(mark) : end], end + len(end_mark)


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def typed_value(raw: str, types: frozenset[str]) -> Any:
    """The value that a parameter of these schema types (none: any) has when its text is `raw`."""
    try:
        value = parse_json(raw.encode())
    except (ValueError, RecursionError):
        return raw
    kind = JSON_TYPES[type(value)]
    if not types or kind in types or (kind == "integer" and "number" in types):
        # A quoted string in place of a bare one is part of the string, as the engines read it.
        return raw if kind == "string" else value
    return raw if "string" in types else value

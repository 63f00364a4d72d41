"""The Kimi K2 format: what its template writes, and every way to fall short of it."""

import json
from typing import Any

import pytest

from kvq.verify.toolcalls.calls import ToolCall
from kvq.verify.toolcalls.kimi import parse_kimi

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def call(identifier: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{identifier}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"city": "Lyon", "n": 3, "x": -2.5e3, "b": False, "z": None},
        {"deep": {"a": [1, {"b": ["</x>", "\u00e9\u2028"]}]}},
        {"text": "\u4f60\u597d \U0001f600"},
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_call(arguments: dict[str, Any], ascii_only: bool) -> None:
    text = BEGIN + call("functions.get-it.v2:0", json.dumps(arguments, ensure_ascii=ascii_only)) + END
    parsed = parse_kimi(text)
    assert parsed.calls == (ToolCall("get-it.v2", arguments),) and parsed.problems == () and parsed.content == ""


def test_several_calls_and_the_text_around_them() -> None:
    text = "First.\n" + BEGIN + call("functions.a:0", "{}") + "\n" + call("functions.b:1", '{"x": 1}') + END + "Last."
    parsed = parse_kimi(text)
    assert parsed.calls == (ToolCall("a", {}), ToolCall("b", {"x": 1}))
    assert parsed.content == "First.\nLast." and parsed.problems == ()


@pytest.mark.parametrize("text", ["", "No tool is needed.", "functions.a:0 {}"])
def test_no_call(text: str) -> None:
    parsed = parse_kimi(text)
    assert (parsed.calls, parsed.problems, parsed.content, parsed.triggered) == ((), (), text, False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BEGIN, "the section is cut off"),
        (BEGIN + END, "the section holds no call"),
        (BEGIN + "<|tool_call_begin|>functions.a:0", "call 1: it is cut off"),
        (BEGIN + "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{", "call 1: it is cut off"),
        (BEGIN + call("functions.a:0", "{}"), "the section is cut off"),
        (BEGIN + call("a:0", "{}") + END, "'a:0' is not of the form functions.NAME:INDEX"),
        (BEGIN + call("functions.a", "{}") + END, "is not of the form"),
        (BEGIN + call("functions.a b:0", "{}") + END, "is not of the form"),
        (BEGIN + call("functions.a:x", "{}") + END, "is not of the form"),
        (BEGIN + call("functions.a:0", "{'x': 1}") + END, "its arguments are not JSON"),
        (BEGIN + call("functions.a:0", "") + END, "its arguments are not JSON"),
        (BEGIN + call("functions.a:0", '{"x": NaN}') + END, "NaN is no JSON"),
        (BEGIN + call("functions.a:0", '{"x": 1e999}') + END, "1e999 is no number that a float can hold"),
        (BEGIN + call("functions.a:0", '{"x": 1, "x": 2}') + END, "the name 'x' stands twice"),
        (BEGIN + call("functions.a:0", "[1]") + END, "its arguments are a list, not an object"),
        (BEGIN + call("functions.a:0", '{"a":' * 100_000) + END, "its arguments are not JSON"),
        (BEGIN + call("functions.a:0", "{}") + "chatter" + END, "'chatter' follows it"),
        (BEGIN + "chatter" + call("functions.a:0", "{}") + END, "'chatter' stands where"),
        (BEGIN + "<|tool_call_begin|>functions.a:0{}<|tool_call_end|>" + END, "it has no <|tool_call_argument_begin|>"),
        (BEGIN + call("functions.a:0", "{}") + END + BEGIN + END, "there is a second section"),
        (call("functions.a:0", "{}"), "<|tool_call_begin|> stands outside of a section"),
    ],
)
def test_malformed(text: str, problem: str) -> None:
    parsed = parse_kimi(text)
    assert any(problem in one for one in parsed.problems), parsed
    assert parsed.triggered


def test_nested_marks_break_one_call_only() -> None:
    text = BEGIN + "<|tool_call_begin|>functions.a:0" + call("functions.b:1", "{}") + END
    parsed = parse_kimi(text)
    assert parsed.calls == (ToolCall("b", {}),) and parsed.problems == ("call 1: it is cut off",)


def test_calls_in_reasoning_do_not_count() -> None:
    section = BEGIN + call("functions.a:0", "{}") + END
    assert parse_kimi(f"<think>{section}").calls == ()
    assert parse_kimi(f"<think>{section}</think>No.").content == "No."
    assert parse_kimi(f"hm</think>{section}").calls == (ToolCall("a", {}),)


def test_every_prefix_is_no_whole_answer_and_raises_nothing() -> None:
    whole = BEGIN + call("functions.a:0", '{"x": "y"}') + END
    for length in range(len(BEGIN), len(whole)):
        assert parse_kimi(whole[:length]).problems, whole[:length]
    assert parse_kimi(whole).problems == ()

"""The GLM format: what its templates write, and every way to fall short of it."""

from typing import Any

import pytest

from kvq.verify.toolcalls.calls import ToolCall
from kvq.verify.toolcalls.glm import parse_glm, typed_value
from kvq.verify.toolcalls.tools import openai_tools


def call(name: str, *pairs: tuple[str, str], newlines: bool = True) -> str:
    """As GLM-4.5 (line breaks) or GLM-4.7 and later (none) write it."""
    end = "\n" if newlines else ""
    fields = "".join(f"<arg_key>{k}</arg_key>{end}<arg_value>{v}</arg_value>{end}" for k, v in pairs)
    return f"<tool_call>{name}{end}{fields}</tool_call>"


def tools(**properties: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": properties}
    return openai_tools([{"name": "f", "parameters": schema}], "test")


@pytest.mark.parametrize("newlines", [True, False])
@pytest.mark.parametrize(
    ("pairs", "arguments"),
    [
        ((), {}),
        ((("city", "Lyon"),), {"city": "Lyon"}),
        ((("n", "3"), ("x", "2.5"), ("b", "true"), ("z", "null")), {"n": 3, "x": 2.5, "b": True, "z": None}),
        ((("deep", '{"a": [1, {"b": "\\u00e9"}]}'),), {"deep": {"a": [1, {"b": "\u00e9"}]}}),
        ((("text", "\u4f60\u597d \U0001f600 caf\u00e9\u2028x"),), {"text": "\u4f60\u597d \U0001f600 caf\u00e9\u2028x"}),
        ((("text", "two\nlines\n"),), {"text": "two\nlines\n"}),
        ((("code", "if a < b:\n  </tool_call> <tool_call>"),), {"code": "if a < b:\n  </tool_call> <tool_call>"}),
        ((("empty", ""),), {"empty": ""}),
        ((("\u540d", "x"),), {"\u540d": "x"}),
    ],
)
def test_a_call(newlines: bool, pairs: tuple[tuple[str, str], ...], arguments: dict[str, Any]) -> None:
    parsed = parse_glm(call("f", *pairs, newlines=newlines))
    assert parsed.calls == (ToolCall("f", arguments),) and parsed.problems == () and parsed.content == ""
    assert parsed.triggered


def test_several_calls_and_the_text_around_them() -> None:
    text = (
        "Let me look.\n"
        + call("get_weather", ("city", "Oslo"))
        + "\n"
        + call("set-timer.v2", ("minutes", "5"))
        + "\nDone."
    )
    parsed = parse_glm(text)
    assert parsed.calls == (ToolCall("get_weather", {"city": "Oslo"}), ToolCall("set-timer.v2", {"minutes": 5}))
    assert parsed.content == "Let me look.\n\n\nDone." and parsed.problems == ()


@pytest.mark.parametrize("text", ["", "No tool is needed.", "a < b > c", "<arg>"])
def test_no_call(text: str) -> None:
    parsed = parse_glm(text)
    assert (parsed.calls, parsed.problems, parsed.content, parsed.triggered) == ((), (), text, False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>", "call 1: it is cut off"),
        ("<tool_call>get_wea", "call 1: it is cut off"),
        ("<tool_call>f\n<arg_key>ci", "call 1: it is cut off"),
        ("<tool_call>f\n<arg_key>city</arg_key>\n", "call 1: it is cut off"),
        ("<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Ly", "call 1: it is cut off"),
        ("<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Lyon</arg_value>\n", "call 1: it is cut off"),
        ("<tool_call>f\n<arg_key>a</arg_key><arg_key>b</arg_key>", "'<arg_key>b</arg_key>' stands where <arg_value>"),
        ("<tool_call>f\n<arg_key>a</arg_key>1</tool_call>", "'1</tool_call>' stands where <arg_value> belongs"),
        ("<tool_call>f\n<arg_value>1</arg_value></tool_call>", "is not a name"),
        ("<tool_call></tool_call>", "call 1: '' is not a name"),
        ("<tool_call>two words</tool_call>", "call 1: 'two words' is not a name"),
        ('<tool_call>{"name": "f"}</tool_call>', "is not a name"),
        ("<tool_call>f<tool_call>g</tool_call>", "call 1: '<tool_call>g</tool_call>' stands where"),
        (call("f", ("a", "1"), ("a", "2")), "the argument 'a' appears twice"),
        ("text </tool_call>", "</tool_call> stands outside of a call"),
        (call("f") + "<arg_key>a</arg_key>", "<arg_key> stands outside of a call"),
    ],
)
def test_malformed(text: str, problem: str) -> None:
    parsed = parse_glm(text)
    assert any(problem in one for one in parsed.problems), parsed
    assert parsed.triggered


def test_a_broken_call_is_one_problem_and_its_neighbours_stay() -> None:
    parsed = parse_glm(call("a") + "<tool_call>b\n<arg_key>x</arg_key>oops</tool_call> tail" + call("c"))
    assert [one.name for one in parsed.calls] == ["a", "c"]
    assert len(parsed.problems) == 1 and parsed.problems[0].startswith("call 2: ")
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("<think>Shall I <tool_call>x</tool_call>?</think>\n" + call("f"), ["f"], ""),
        ("reasoning without its opening mark</think>No.", [], "No."),
        ("<think>still thinking <tool_call>f</tool_call>", [], ""),
    ],
)
def test_calls_in_reasoning_do_not_count(text: str, calls: list[str], content: str) -> None:
    parsed = parse_glm(text)
    assert [one.name for one in parsed.calls] == calls and parsed.content == content and parsed.problems == ()


@pytest.mark.parametrize(
    ("raw", "types", "value"),
    [
        ("2024", {"string"}, "2024"),
        ("2024", {"integer"}, 2024),
        ("2024", set(), 2024),
        ("2024", {"number"}, 2024),
        ("true", {"string"}, "true"),
        ("null", {"string", "null"}, None),
        ("123", {"string", "null"}, "123"),
        ('"quoted"', {"string"}, '"quoted"'),
        ('"quoted"', set(), '"quoted"'),
        ("[1]", {"array"}, [1]),
        ("abc", {"integer"}, "abc"),
        ("NaN", set(), "NaN"),
        ('{"a": 1, "a": 2}', {"object"}, '{"a": 1, "a": 2}'),
        ("2.5", {"integer"}, 2.5),
        ("[" * 100_000, set(), "[" * 100_000),
    ],
)
def test_a_value_has_the_type_that_the_schema_says(raw: str, types: set[str], value: object) -> None:
    found = typed_value(raw, frozenset(types))
    assert found == value and type(found) is type(value)


def test_types_come_from_the_called_tool() -> None:
    text = call("f", ("id", "7"), ("count", "7"), ("maybe", "null"), ("free", "7"))
    declared = tools(
        id={"type": "string"},
        count={"type": "integer"},
        maybe={"anyOf": [{"type": "string"}, {"type": "null"}]},
        free={},
    )
    assert parse_glm(text, declared).calls[0].arguments == {"id": "7", "count": 7, "maybe": None, "free": 7}
    assert parse_glm(text.replace(">f\n", ">g\n"), declared).calls[0].arguments == {
        "id": 7, "count": 7, "maybe": None, "free": 7,
    }  # fmt: skip


def test_every_prefix_of_a_call_is_no_call_and_raises_nothing() -> None:
    whole = "Sure. " + call("f", ("a", "1"), ("b", "two"))
    for length in range(len("Sure. <tool_call>"), len(whole)):
        parsed = parse_glm(whole[:length])
        assert (parsed.calls, parsed.problems) == ((), ("call 1: it is cut off",)), whole[:length]

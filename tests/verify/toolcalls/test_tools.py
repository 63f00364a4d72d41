"""Tool declarations and JSON schemas, which come from data files and are not trusted."""

from typing import Any

import pytest

from kvq.errors import CalibrationError
from kvq.verify.toolcalls.calls import ToolCall
from kvq.verify.toolcalls.tools import openai_tools, parameter_types, schema_problem
from tests.openai_server import Engine, serve

WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_short_form_becomes_a_strict_schema() -> None:
    (tool,) = openai_tools([{"name": "set_timer", "parameters": ["minutes"]}], "row")
    assert tool == {
        "type": "function",
        "function": {
            "name": "set_timer",
            "parameters": {
                "type": "object", "properties": {"minutes": {}}, "required": ["minutes"], "additionalProperties": False,
            },
        },
    }  # fmt: skip


def test_the_openai_form_stays_as_it_is() -> None:
    tool = {"type": "function", "function": WEATHER}
    assert openai_tools([tool], "row") == [tool] == openai_tools([WEATHER], "row")


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("f", "needs a `name`"),
        ({"parameters": {}}, "needs a `name`"),
        ({"name": "f", "parameters": "x"}, "must be a JSON schema or a list of names"),
        ({"name": "f", "parameters": [1]}, "must be a JSON schema or a list of names"),
        ({"name": "f", "parameters": {"type": "nonsense"}}, "is not a JSON schema"),
    ],
)
def test_declarations_that_are_none(tool: Any, reason: str) -> None:
    with pytest.raises(CalibrationError, match=reason) as error:
        openai_tools([WEATHER, tool], "rows.jsonl:7")
    assert str(error.value).startswith("rows.jsonl:7: tool 2: ")


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("get_weather", {"city": "Oslo"}, None),
        ("get_weather", {"city": "Oslo", "days": 2}, None),
        ("get_weather", {"city": 1}, "1 is not of type 'string'"),
        ("get_weather", {"city": "Oslo", "days": 0}, "0 is less than the minimum"),
        ("get_weather", {"days": 1}, "'city' is a required property"),
        ("get_weather", {"city": "Oslo", "unit": "C"}, "Additional properties are not allowed"),
        ("get_wether", {"city": "Oslo"}, "there is no tool 'get_wether'"),
        ("get_weather", None, "its arguments are not a JSON object"),
    ],
)
def test_schema_validity(name: str, arguments: dict[str, Any] | None, problem: str | None) -> None:
    found = schema_problem(ToolCall(name, arguments), openai_tools([WEATHER], "row"))
    assert found == problem if problem is None else problem in str(found)


def test_types_of_parameters() -> None:
    properties = {
        "one": {"type": "string"}, "two": {"type": ["integer", "null"]}, "open": {}, "odd": True,
        "either": {"anyOf": [{"type": "string"}, {"type": "object"}]}, "half": {"oneOf": [{"type": "string"}, {}]},
    }  # fmt: skip
    declared = openai_tools([{"name": "f", "parameters": {"type": "object", "properties": properties}}], "row")
    assert parameter_types(declared, "f") == {
        "one": {"string"}, "two": {"integer", "null"}, "either": {"string", "object"},
    }  # fmt: skip
    assert parameter_types(declared, "g") == {}


def test_a_schema_never_reaches_the_network() -> None:
    with serve(Engine(models={"type": "string"})) as engine:
        schema = {"type": "object", "properties": {"a": {"$ref": engine.url + "/v1/schema"}}}
        tools = openai_tools([{"name": "f", "parameters": schema}], "row")
        with pytest.raises(CalibrationError, match="kvq fetches nothing"):
            schema_problem(ToolCall("f", {"a": 1}), tools)
        assert engine.asked == []
        assert engine.got == 0

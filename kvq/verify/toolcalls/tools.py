"""Tool declarations: from the short form of data files to the OpenAI form, and what their schemas say."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq.errors import CalibrationError, RecipeError
from kvq.verify.toolcalls.calls import ToolCall


def openai_tools(tools: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """`{"type": "function", "function": {name, parameters}}` for each. Raises CalibrationError.

    A row may give functions bare, and `parameters` as a list of names: each then is required, of any type.
    """
    return [_openai_tool(tool, f"{place}: tool {number}") for number, tool in enumerate(tools, start=1)]


def _openai_tool(tool: Any, place: str) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CalibrationError(f"{place}: needs a `name` and `parameters`, alone or under `function`.")
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if isinstance(parameters, list) and all(isinstance(name, str) for name in parameters):
        parameters = {
            "type": "object",
            "properties": {name: {} for name in parameters},
            "required": list(parameters),
            "additionalProperties": False,
        }
    if not isinstance(parameters, Mapping):
        raise CalibrationError(f"{place}: `parameters` must be a JSON schema or a list of names.")
    _check_schema(parameters, place)
    return {"type": "function", "function": {**function, "parameters": dict(parameters)}}


def _find(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    schemas = (tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name)
    return next(schemas, None)


def parameter_types(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, frozenset[str]]:
    """Types that a tool's schema allows for each parameter; those that it leaves open are absent."""
    properties = (_find(tools, name) or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {key: types for key, schema in properties.items() if (types := _types(schema))}


def _types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(str(one) for one in declared)
    options = [_types(option) for key in ("anyOf", "oneOf") for option in schema.get(key, ())]
    return frozenset().union(*options) if all(options) else frozenset()


def _validator(schema: Mapping[str, Any]) -> Any:
    """A validator that never fetches what a schema refers to: data files are not trusted with the network."""
    try:
        from jsonschema.validators import Draft202012Validator, validator_for
        from referencing import Registry
    except ImportError:
        raise RecipeError("checking tool calls needs jsonschema: pip install 'kvq[eval]'.") from None
    return validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())


def _check_schema(schema: Mapping[str, Any], place: str) -> None:
    from jsonschema.exceptions import SchemaError

    try:
        _validator(schema).check_schema(schema)
    except SchemaError as error:
        raise CalibrationError(f"{place}: `parameters` is not a JSON schema ({error.message[:100]}).") from None


def schema_problem(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a call does not fit its tool, None if it does. Raises CalibrationError for a schema with a dead reference."""
    from referencing.exceptions import Unresolvable

    schema = _find(tools, call.name)
    if schema is None:
        return f"there is no tool {call.name[:40]!r}"
    if call.arguments is None:
        return "its arguments are not a JSON object"
    try:
        error = next(_validator(schema).iter_errors(dict(call.arguments)), None)
    except Unresolvable as reason:
        raise CalibrationError(
            f"tool {call.name}: its schema refers to {str(reason)[:80]}, which is not in it; kvq fetches nothing."
        ) from None
    return None if error is None else str(error.message)[:160]

"""What a parser gives: calls, the text around them, and every departure from the format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq.checkpoint.untrusted import parse_json

THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is None when the text between the marks is no JSON object."""

    name: str
    arguments: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """`problems` has a sentence for each departure from the format; a call with a problem is not among `calls`."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def triggered(self) -> bool:
        """Whether the model set out to call a tool, well formed or not."""
        return bool(self.calls or self.problems)


class MalformedError(ValueError):
    """A call that departs from its format; parsers turn it into a problem."""


def json_object(text: str) -> dict[str, Any]:
    """Arguments of a call. Raises MalformedError."""
    try:
        value = parse_json(text.encode())
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"its arguments are not JSON ({error})") from None
    if not isinstance(value, dict):
        raise MalformedError(f"its arguments are a {type(value).__name__}, not an object")
    return value


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and answer. Chat templates often write the opening mark themselves, so the closing one decides."""
    before, mark, after = text.partition(THINK_END)
    if mark:
        return before.removeprefix(THINK_START), after
    if text.lstrip().startswith(THINK_START):  # cut off while it was thinking
        return text.lstrip().removeprefix(THINK_START), ""
    return "", text

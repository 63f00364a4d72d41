"""What a model does with each question: one Outcome, from its own text or from a server's API, streamed or not."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import ServerError
from kvq.verify.answers import Answerer, Watch
from kvq.verify.chat import ChatFormat
from kvq.verify.questions import Question
from kvq.verify.server import Server
from kvq.verify.toolcalls.calls import MalformedError, ParsedAnswer, ToolCall, json_object
from kvq.verify.toolcalls.formats import Parser


@dataclass(frozen=True, slots=True)
class Outcome:
    """`parsed` has the calls; `cut` says that the limit of tokens ended the answer."""

    parsed: ParsedAnswer
    cut: bool


def ask_text(
    questions: Sequence[Question], answerer: Answerer, chat: ChatFormat, parser: Parser, max_tokens: int, watch: Watch
) -> list[Outcome]:
    """Answers as text, parsed here. Raises CalibrationError, ServerError."""
    prompts = [chat.encode(chat.render(one.messages, one.tools, one.id)) for one in questions]
    answers = answerer.generate(prompts, max_tokens, (), watch)
    return [Outcome(parser(answer.text, one.tools), answer.cut) for one, answer in zip(questions, answers, strict=True)]


def ask_server(
    questions: Sequence[Question], server: Server, room: Callable[[Question], int], watch: Watch, *, stream: bool
) -> list[Outcome]:
    """Answers by /v1/chat/completions with `tools`, parsed by the server. Raises ServerError.

    `room` gives the tokens that an answer may have: servers refuse more than fit their context.
    """

    def ask(question: Question) -> Outcome:
        asked: dict[str, Any] = {
            "messages": list(question.messages), "temperature": 0, "max_tokens": room(question),
        }  # fmt: skip
        if question.tools:
            asked |= {"tools": list(question.tools), "tool_choice": "auto"}
        place = f"{server.place}/chat/completions: {question.id}"
        if stream:
            return outcome(*assemble(server.stream("/chat/completions", asked), place), place)
        choice = _first(server.post("/chat/completions", asked), place)
        message = choice.get("message")
        if not isinstance(message, dict):
            raise ServerError(f"{place}: the choice holds no message.")
        return outcome(message, choice.get("finish_reason"), place)

    return server.each(ask, questions, watch)


def _first(event: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ServerError(f"{place}: the answer holds no choice.")
    return choices[0]


def outcome(message: Mapping[str, Any], reason: Any, place: str) -> Outcome:
    """A message in the OpenAI form. Its arguments are text, which may be no JSON: that is the model's doing."""
    if reason not in ("stop", "tool_calls", "length"):
        raise ServerError(f"{place}: finish_reason is {reason!r}; expected stop, tool_calls or length.")
    calls, problems = [], []
    for number, raw in enumerate(message.get("tool_calls") or (), start=1):
        function = raw.get("function") if isinstance(raw, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            problems.append(f"call {number}: it has no name")
            continue
        try:
            calls.append(ToolCall(function["name"], json_object(str(function.get("arguments") or "{}"))))
        except MalformedError as error:
            problems.append(f"call {number}: {error}")
    if reason == "tool_calls" and not calls and not problems:
        problems.append("finish_reason is tool_calls, but there is no call")
    content = message.get("content") or ""
    return Outcome(ParsedAnswer(str(content).strip(), tuple(calls), tuple(problems)), reason == "length")


def assemble(events: Iterable[Mapping[str, Any]], place: str) -> tuple[dict[str, Any], Any]:
    """The message that streamed deltas add up to, and its finish_reason. Raises ServerError.

    A call's name and id come once, its arguments in pieces; `index` says to which call a piece belongs.
    """
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    for event in events:
        if not event.get("choices"):  # usage, at the end
            continue
        choice = _first(event, place)
        reason = choice.get("finish_reason") or reason
        delta = choice.get("delta") or {}
        content.append(delta.get("content") or "")
        for piece in delta.get("tool_calls") or ():
            _add_piece(calls, piece, place)
    return {"content": "".join(content), "tool_calls": [calls[index] for index in sorted(calls)]}, reason


def _add_piece(calls: dict[int, dict[str, Any]], piece: Any, place: str) -> None:
    index = piece.get("index") if isinstance(piece, Mapping) else None
    if not isinstance(index, int):
        raise ServerError(f"{place}: a streamed piece of a call has no index.")
    function = calls.setdefault(index, {"function": {"name": None, "arguments": ""}})["function"]
    given = piece.get("function") or {}
    function["name"] = function["name"] or given.get("name")
    function["arguments"] += given.get("arguments") or ""

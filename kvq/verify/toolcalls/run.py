"""Tool calls of two models, by each way of asking: the report, and outcomes to compare with later."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq.checkpoint.index import load_json
from kvq.errors import CalibrationError, RecipeError, ServerError
from kvq.verify.answers import Watch
from kvq.verify.chat import ChatFormat
from kvq.verify.models import opened
from kvq.verify.questions import Question, QuestionFile
from kvq.verify.report_file import require
from kvq.verify.server import Server
from kvq.verify.toolcalls.ask import Outcome, ask_server, ask_text
from kvq.verify.toolcalls.calls import ParsedAnswer, ToolCall
from kvq.verify.toolcalls.formats import parser_of
from kvq.verify.toolcalls.score import compare_outcomes, same_calls

ANSWERS_SCHEMA = "kvq.toolcall-answers/1"
CHAT_MARGIN = 64  # a server's own rendering may be some tokens longer than the one here
TEXT, SERVER, STREAM = "text", "server", "server, streamed"
Outcomes = Mapping[str, Sequence[Outcome]]


def ask_model(
    file: QuestionFile, folder: Path, url: str | None, device: str, concurrency: int, max_tokens: int, watch: Watch
) -> dict[str, list[Outcome]]:
    """A model's outcomes by way of asking: its own text in this process, or a server's API without and with streams."""
    if file.kind != "tool-calls":
        raise CalibrationError(f"{file.name}: its rows have no `tools`; `kvq tasks` asks other questions.")
    if url is not None:
        chat = ChatFormat(folder)
        with Server(url, concurrency=concurrency) as server:

            def room(question: Question) -> int:
                prompt = chat.encode(chat.render(question.messages, question.tools, question.id))
                left = server.context - len(prompt) - CHAT_MARGIN
                if left < 1:
                    raise ServerError(f"{server.place}: {question.id} leaves no room for an answer.")
                return min(max_tokens, left)

            return {
                SERVER: ask_server(file.questions, server, room, watch, stream=False),
                STREAM: ask_server(file.questions, server, room, watch, stream=True),
            }
    parser = parser_of(folder)
    with opened(folder, None, device, concurrency) as (answerer, _):
        return {TEXT: ask_text(file.questions, answerer, ChatFormat(folder), parser, max_tokens, watch)}


def compare_models(file: QuestionFile, source: Outcomes, quantized: Outcomes, max_tokens: int) -> dict[str, Any]:
    """The report's body. Raises RecipeError when the two were asked in no common way."""
    common = [way for way in quantized if way in source]
    if not common:
        raise RecipeError(
            f"the source was asked by {', '.join(source)}, the quantized model by {', '.join(quantized)}; ask both by "
            "a server, or both in this process."
        )
    return {
        "data": {"name": file.name, "sha256": file.sha256, "rows": file.num_rows},
        "max_tokens": max_tokens,
        "ways": {way: compare_outcomes(file.questions, source[way], quantized[way]) for way in common},
        "stream_differs": {
            "source": stream_differences(file, source),
            "quantized": stream_differences(file, quantized),
        },
    }


def stream_differences(file: QuestionFile, outcomes: Outcomes) -> list[str] | None:
    """Rows whose streamed calls are others than the plain ones; None where only one way was asked."""
    if not {SERVER, STREAM} <= set(outcomes):
        return None
    triples = zip(file.questions, outcomes[SERVER], outcomes[STREAM], strict=True)
    return [
        question.id
        for question, plain, streamed in triples
        if plain.parsed.problems != streamed.parsed.problems
        or not same_calls(plain.parsed.calls, streamed.parsed.calls)
    ]


def outcomes_document(model: str, file: QuestionFile, max_tokens: int, outcomes: Outcomes) -> dict[str, Any]:
    """Outcomes as JSON, to compare with later."""
    return {
        "schema": ANSWERS_SCHEMA,
        "model": model,
        "data_sha256": file.sha256,
        "max_tokens": max_tokens,
        "ways": {way: [_plain(outcome) for outcome in several] for way, several in outcomes.items()},
    }


def _plain(outcome: Outcome) -> dict[str, Any]:
    parsed = outcome.parsed
    return {
        "content": parsed.content,
        "calls": [{"name": call.name, "arguments": call.arguments} for call in parsed.calls],
        "problems": list(parsed.problems),
        "cut": outcome.cut,
    }


def read_outcomes(path: Path, file: QuestionFile, max_tokens: int) -> dict[str, list[Outcome]]:
    """What `outcomes_document` gave for the same questions. Raises CheckpointError, RecipeError, VerificationError."""
    document = require(load_json(path), ANSWERS_SCHEMA, path)
    for key, wanted in (("data_sha256", file.sha256), ("max_tokens", max_tokens)):
        if document.get(key) != wanted:
            raise RecipeError(f"{path}: its {key} is {str(document.get(key))[:64]}, this run's is {wanted}.")
    ways = {}
    for way, several in require(document.get("ways"), None, path, "ways").items():
        outcomes = [_outcome(require(one, None, path, f"an answer of {way}"), path) for one in several or ()]
        if len(outcomes) < len(file.questions):
            raise RecipeError(f"{path}: holds {len(outcomes)} answers, {len(file.questions)} are asked for.")
        ways[str(way)] = outcomes[: len(file.questions)]
    return ways


def _outcome(row: Mapping[str, Any], path: Path) -> Outcome:
    calls = [require(call, None, path, "a call") for call in row.get("calls") or ()]
    parsed = ParsedAnswer(
        str(row.get("content")),
        tuple(ToolCall(str(call.get("name")), call.get("arguments")) for call in calls),
        tuple(str(problem) for problem in row.get("problems") or ()),
    )
    return Outcome(parsed, row.get("cut") is True)

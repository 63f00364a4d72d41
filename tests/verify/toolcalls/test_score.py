"""Figures of tool calls on cases counted by hand, and a whole comparison over HTTP."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import RecipeError, ServerError, VerificationError
from kvq.verify.questions import QuestionFile, load_questions
from kvq.verify.server import Server
from kvq.verify.toolcalls import run
from kvq.verify.toolcalls.ask import Outcome, ask_server, assemble, outcome
from kvq.verify.toolcalls.calls import ParsedAnswer, ToolCall
from kvq.verify.toolcalls.score import compare_outcomes, same_calls, trigger_figures
from tests.openai_server import Engine, chat_choice, serve, stream_events

TIMER = {"name": "set_timer", "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}}}


def ignore(text: str) -> None:
    pass


def said(*calls: ToolCall, problems: tuple[str, ...] = (), cut: bool = False) -> Outcome:
    return Outcome(ParsedAnswer("text", calls, problems), cut)


def timer(minutes: Any) -> ToolCall:
    return ToolCall("set_timer", {"minutes": minutes})


@pytest.fixture
def file(tmp_path: Path) -> QuestionFile:
    """Six questions: five minutes wanted in the first three, nothing in the fourth, unknown in the last two."""
    wanted: list[dict[str, Any]] = [{"call": {"name": "set_timer", "arguments": {"minutes": 5}}}] * 3
    rows = [{"tools": [TIMER], "user": f"q{i}", **extra} for i, extra in enumerate([*wanted, {"call": None}, {}, {}])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_questions(tmp_path / "rows.jsonl")


def test_figures_by_hand(file: QuestionFile) -> None:
    source = [said(timer(5)), said(timer(5)), said(timer(5)), said(), said(timer(1)), said()]
    broken = said(problems=("call 1: it is cut off",))
    quantized = [said(timer(5)), said(timer(6), cut=True), said(), said(timer("x")), broken, said()]
    found = compare_outcomes(file.questions, source, quantized)
    assert found["trigger"] == {
        "both": 3, "only_quantized": 1, "only_source": 1, "neither": 1,
        "precision": 0.75, "recall": 0.75, "f1": 0.75,
    }  # fmt: skip
    assert found["source"]["schema_valid"]["correct"] == 4 == found["source"]["schema_valid"]["total"]
    ours = found["quantized"]
    assert (ours["triggered"], ours["schema_valid"]["correct"], ours["schema_valid"]["total"], ours["cut"]) == (
        4,
        2,
        4,
        1,
    )
    assert [one["id"] for one in ours["invalid"]] == ["row 4", "row 5"]
    assert found["same_as_source"]["correct"] == 2
    assert [one["id"] for one in found["differing"]] == ["row 2", "row 3", "row 4", "row 5"]
    reference = found["reference"]
    assert (reference["source"]["correct"], reference["quantized"]["correct"], reference["source"]["total"]) == (
        4,
        1,
        4,
    )
    assert (reference["flips"]["lost"], reference["flips"]["gained"], reference["recovery"]) == (3, 0, 25.0)


def test_precision_is_of_what_this_model_calls_and_recall_of_what_the_source_calls() -> None:
    source = [said(timer(1))] * 5 + [said()]
    quantized = [said(timer(2))] * 2 + [said()] * 3 + [said(timer(1))]
    figures = trigger_figures(source, quantized)
    assert (figures["precision"], figures["recall"], figures["f1"]) == (2 / 3, 2 / 5, 0.5)


def test_nobody_calls() -> None:
    figures = trigger_figures([said()], [said()])
    assert (figures["precision"], figures["recall"], figures["f1"]) == (None, None, None)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"a": "1"}, False),
        ({"a": [1, 2]}, {"a": [2, 1]}, False),
        ({"a": None}, {}, False),
        ({"a": {"b": [1.0]}}, {"a": {"b": [1]}}, True),
    ],
)
def test_exact_match(left: dict[str, Any], right: dict[str, Any], same: bool) -> None:
    assert same_calls([ToolCall("f", left)], [ToolCall("f", right)]) is same
    assert not same_calls([ToolCall("f", left)], [ToolCall("g", left)])


def test_order_and_number_of_calls_count() -> None:
    assert not same_calls([timer(1), timer(2)], [timer(2), timer(1)])
    assert not same_calls([timer(1)], [timer(1), timer(1)])


@pytest.mark.parametrize(
    ("choice", "calls", "problems", "cut"),
    [
        (chat_choice(content="hi"), (), (), False),
        (chat_choice(("set_timer", '{"minutes": 5}')), (timer(5),), (), False),
        (chat_choice(("a", "{}"), ("b", "")), (ToolCall("a", {}), ToolCall("b", {})), (), False),
        (chat_choice(("a", "{"), reason="length"), (), ("call 1: its arguments are not JSON",), True),
        (chat_choice(("a", "[]")), (), ("call 1: its arguments are a list",), False),
        (chat_choice(("", "{}")), (), ("call 1: it has no name",), False),
        (chat_choice(reason="tool_calls"), (), ("finish_reason is tool_calls, but there is no call",), False),
        (
            chat_choice(("say", '{"t": "\u4f60\u2028\U0001f600"}')),
            (ToolCall("say", {"t": "\u4f60\u2028\U0001f600"}),),
            (),
            False,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_choices_plain_and_streamed(
    choice: dict[str, Any], calls: tuple[ToolCall, ...], problems: tuple[str, ...], cut: bool, stream: bool
) -> None:
    message, reason = choice["message"], choice["finish_reason"]
    if stream:
        message, reason = assemble(stream_events(choice), "test")
    found = outcome(message, reason, "test")
    assert found.cut is cut and len(found.parsed.problems) == len(problems)
    assert all(wanted in got for wanted, got in zip(problems, found.parsed.problems, strict=True))
    assert found.parsed.calls == calls


@pytest.mark.parametrize("call", [None, {}, {"function": {}}, {"function": {"name": 1}}])
def test_a_call_without_a_name(call: Any) -> None:
    found = outcome({"tool_calls": [call]}, "tool_calls", "test")
    assert found.parsed.problems == ("call 1: it has no name",) and found.parsed.triggered


def test_interleaved_pieces_find_their_calls() -> None:
    def piece(index: int, name: str | None, text: str) -> dict[str, Any]:
        function = {"name": name, "arguments": text} if name else {"arguments": text}
        return {"choices": [{"delta": {"tool_calls": [{"index": index, "function": function}]}, "finish_reason": None}]}

    events = [piece(1, "b", ""), piece(0, "a", '{"x"'), piece(1, None, "{}"), piece(0, None, ": 1}")]
    message, _ = assemble(events, "test")
    assert outcome(message, "tool_calls", "test").parsed.calls == (ToolCall("a", {"x": 1}), ToolCall("b", {}))


@pytest.mark.parametrize("reason", [None, "error", "abort", "content_filter"])
def test_an_answer_that_did_not_end(reason: str | None) -> None:
    with pytest.raises(ServerError, match="finish_reason"):
        outcome({"content": "x"}, reason, "test")


def test_a_piece_without_index() -> None:
    events = [{"choices": [{"delta": {"tool_calls": [{"function": {"name": "a"}}]}}]}]
    with pytest.raises(ServerError, match="no index"):
        assemble(events, "test")


@contextmanager
def scripted(answers: dict[str, dict[str, Any]], piece: int = 7) -> Iterator[Engine]:
    """An engine that answers each question by its text."""
    with serve(Engine(chat=lambda request: answers[request["messages"][-1]["content"]], piece=piece)) as engine:
        yield engine


@pytest.mark.parametrize("piece", [1, 5, 4096])
def test_over_http_plain_and_streamed(file: QuestionFile, piece: int) -> None:
    answers = {f"q{i}": chat_choice(("set_timer", json.dumps({"minutes": i}))) for i in range(5)}
    answers["q5"] = chat_choice(content="caf\u00e9\u2028\U0001f600")
    wanted = [(timer(i),) for i in range(5)] + [()]
    with scripted(answers, piece) as engine, Server(engine.url) as server:
        for stream in (False, True):
            found = ask_server(file.questions, server, lambda question: 100, ignore, stream=stream)
            assert [one.parsed.calls for one in found] == wanted
            assert found[5].parsed.content == "caf\u00e9\u2028\U0001f600"
    for asked in engine.asked:
        assert asked["tools"][0]["type"] == "function" and asked["temperature"] == 0 and asked["max_tokens"] == 100


def test_outcomes_survive_their_file(file: QuestionFile, tmp_path: Path) -> None:
    outcomes = {run.TEXT: [said(timer(i), problems=("p",), cut=i == 2) for i in range(6)]}
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(run.outcomes_document("m", file, 50, outcomes)))
    assert run.read_outcomes(path, file, 50) == outcomes
    with pytest.raises(RecipeError, match="max_tokens is 50, this run's is 60"):
        run.read_outcomes(path, file, 60)
    damaged = json.loads(path.read_text())
    damaged["ways"][run.TEXT].pop()
    path.write_text(json.dumps(damaged))
    with pytest.raises(RecipeError, match="holds 5 answers"):
        run.read_outcomes(path, file, 50)
    path.write_text('{"schema": "kvq.toolcalls/1"}')
    with pytest.raises(VerificationError, match="its schema is"):
        run.read_outcomes(path, file, 50)


def test_streams_that_differ_are_named(file: QuestionFile) -> None:
    plain = [said(timer(i)) for i in range(6)]
    streamed = [*plain[:3], said(timer(9)), *plain[4:]]
    ways = {run.SERVER: plain, run.STREAM: streamed}
    report = run.compare_models(file, ways, {run.SERVER: plain, run.STREAM: plain}, 50)
    assert report["stream_differs"] == {"source": ["row 4"], "quantized": []}
    assert set(report["ways"]) == {run.SERVER, run.STREAM}
    with pytest.raises(RecipeError, match="both by a server, or both in this process"):
        run.compare_models(file, {run.TEXT: plain}, ways, 50)

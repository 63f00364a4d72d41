"""The client of an engine, over real HTTP against a scripted engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvq.errors import ServerError
from kvq.verify.answers import Answer
from kvq.verify.server import Server, ServerAnswerer, events
from tests.openai_server import Engine, chat_choice, serve


def ignore(text: str) -> None:
    pass


def connect(engine: Engine) -> Server:
    return Server(engine.url, concurrency=4, timeout=5, pause=0.0)


def stream_all(engine: Engine) -> list[dict[str, Any]]:
    with connect(engine) as server:
        return list(server.stream("/chat/completions", {}))


@contextmanager
def answerer(engine: Engine) -> Iterator[ServerAnswerer]:
    with serve(engine), connect(engine) as server:
        yield ServerAnswerer(server, frozenset({9, 7}))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_however_the_bytes_are_cut(size: int, end: str) -> None:
    lines = [
        ": comment",
        "data: one",
        "",
        "event: x",
        "data:two",
        "data: \u00e9\u2028\u0085 \U0001f600",
        "",
        "data: cut",
    ]
    body = (end.join(lines) + end).encode()
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    assert list(events(iter(pieces))) == ["one", "two\n\u00e9\u2028\u0085 \U0001f600"]


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_address_with_or_without_v1(tail: str) -> None:
    with serve(Engine()) as engine:
        with Server(engine.url + tail) as server:
            pass
        assert (server.place, server.model, server.context) == (engine.url + "/v1", "tiny", 4096)


def test_busy_is_tried_again_and_refusal_is_not() -> None:
    with serve(Engine(chat=lambda request: chat_choice(content="hi"), statuses=[503, 429])) as engine:
        with connect(engine) as server:
            assert server.post("/chat/completions", {})["choices"][0]["message"]["content"] == "hi"
            assert len(engine.asked) == 3
            engine.statuses[:] = [400]
            with pytest.raises(ServerError, match="HTTP 400"):
                server.post("/chat/completions", {})
            assert len(engine.asked) == 4
            engine.statuses[:] = [503] * 9
            with pytest.raises(ServerError, match="HTTP 503"):
                server.post("/chat/completions", {})
            assert len(engine.asked) == 8


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda engine: Server("localhost:1"), "begins with http"),
        (lambda engine: Server("http://127.0.0.1:9", timeout=2), "the server did not answer"),
        (lambda engine: stream_all(engine), r"ended without \[DONE\]"),
    ],
)
def test_what_is_no_answer(act: Callable[[Engine], object], reason: str) -> None:
    with serve(Engine(chat=lambda request: chat_choice(content="x"), done=False)) as engine:
        with pytest.raises(ServerError, match=reason):
            act(engine)


@pytest.mark.parametrize("models", [{}, {"data": []}, {"data": [1]}])
def test_an_address_without_models(models: dict[str, Any]) -> None:
    with serve(Engine(models=models)) as engine, pytest.raises(ServerError, match="lists no model"):
        connect(engine)


def test_errors_in_a_stream() -> None:
    with serve(Engine(statuses=[400])) as engine, pytest.raises(ServerError, match="HTTP 400"):
        stream_all(engine)
    bad = {"message": {"content": "x"}, "finish_reason": "stop"}
    with serve(Engine(chat=lambda request: bad)) as engine:
        engine.line_end = "\n data"  # no event ever ends
        with pytest.raises(ServerError):
            stream_all(engine)


def test_answers_are_greedy_of_tokens_and_in_order() -> None:
    def complete(request: dict[str, Any]) -> dict[str, Any]:
        last = request["prompt"][-1]
        return {"text": f"answer {last}END more", "finish_reason": "length" if last % 2 else "stop"}

    prompts = [[1, 2, number] for number in range(20)]
    engine = Engine(complete=complete)
    with answerer(engine) as model:
        answers = model.generate(prompts, 50, ["END"], ignore)
    assert answers == [Answer(f"answer {number}", cut=number % 2 == 1) for number in range(20)]
    for asked in engine.asked:
        wanted = {
            "temperature": 0, "max_tokens": 50, "stop": ["END"], "stop_token_ids": [7, 9],
            "skip_special_tokens": False, "model": "tiny",
        }  # fmt: skip
        assert wanted.items() <= asked.items()


def test_an_answer_fits_into_the_context() -> None:
    engine = Engine(complete=lambda request: {"text": "", "finish_reason": "stop"})
    with answerer(engine) as model:
        model.generate([[1] * 4000], 1000, [], ignore)
        assert engine.asked[-1]["max_tokens"] == 96
        with pytest.raises(ServerError, match="leaves no room"):
            model.generate([[1] * 4096], 1000, [], ignore)


@pytest.mark.parametrize(
    "choice", [{}, {"text": "x"}, {"text": "x", "finish_reason": "abort"}, {"finish_reason": "stop"}]
)
def test_a_choice_that_is_no_answer(choice: dict[str, Any]) -> None:
    with answerer(Engine(complete=lambda request: choice)) as model, pytest.raises(ServerError):
        model.generate([[1]], 5, [], ignore)


def test_scores_are_those_of_the_continuation() -> None:
    def complete(request: dict[str, Any]) -> dict[str, Any]:
        count = len(request["prompt"])
        values = [None] + [-float(i) for i in range(1, count)] + [-100.0]
        best = [None] + [{"a": -float(i), "b": -9.0 - i} for i in range(1, count)] + [{"c": -100.0}]
        if request["prompt"][-1] == 8:
            best[-2] = {"a": -0.5}
        return {"logprobs": {"token_logprobs": values, "top_logprobs": best}, "finish_reason": "length", "text": ""}

    engine = Engine(complete=complete)
    with answerer(engine) as model:
        scores = model.score([([1, 2, 3], [4, 5]), ([1], [8])], ignore)
    assert scores == [(-7.0, True), (-1.0, False)]
    assert engine.asked[0]["echo"] is True and engine.asked[0]["prompt"] in ([1, 2, 3, 4, 5], [1, 8])


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {},
        {"token_logprobs": [None], "top_logprobs": [None]},
        {"token_logprobs": [0, "x"], "top_logprobs": [{}, {}]},
    ],
)
def test_a_server_without_prompt_log_probabilities(logprobs: Any) -> None:
    choice = {"logprobs": logprobs, "finish_reason": "length", "text": ""}
    with answerer(Engine(complete=lambda request: choice)) as model, pytest.raises(ServerError, match="echo"):
        model.score([([1], [2])], ignore)

"""Loads of random tokens and a client that keeps many requests in flight. Only the standard library."""

import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

VOCABULARY = (10, 2000)  # ids that the tiny checkpoints and the synthetic models have in common
ABORTED_SHARE = 0.05
TIMEOUT_S = 240


@dataclass(frozen=True)
class Request:
    rid: str
    tokens: list[int]
    new_tokens: int
    stream: bool = False
    abort_after_s: float | None = None  # the client loses patience


Load = list[Request]


@dataclass(frozen=True)
class Answer:
    """`full`: the model finished; not cut off by the client, not ended by the server."""

    rid: str
    status: int
    tokens: list[int]
    seconds: float
    full: bool
    cut: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def mixed_load(seed: int, count: int) -> Load:
    """Forty prefixes of up to 700 tokens; most requests start with one, some prompts are longer than a chunk."""
    dice = random.Random(seed)
    prefixes = [_tokens(dice, dice.choice([40, 130, 300, 700])) for _ in range(40)]
    load = []
    for number in range(count):
        start = dice.choice(prefixes) if dice.random() < 0.7 else []
        length = dice.choice([900, 1200]) if dice.random() < 0.03 else dice.randint(1, 80)
        patience = dice.uniform(0.02, 0.4) if dice.random() < ABORTED_SHARE else None
        prompt, new_tokens, stream = start + _tokens(dice, length), dice.choice([4, 16, 48, 96]), dice.random() < 0.3
        load.append(Request(f"r{number:06d}", prompt, new_tokens, stream, patience))
    return load


def steady_load(seed: int, count: int, new_tokens: int) -> Load:
    """Prompts of 256 tokens that share nothing."""
    dice = random.Random(seed)
    return [Request(f"s{seed}-{number}", _tokens(dice, 256), new_tokens) for number in range(count)]


def answer_all(port: int, load: Load, at_once: int) -> list[Answer]:
    """The answers in the order of the load, `at_once` requests in flight."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda request: _ask(port, request), load))


def get_json(port: int, path: str, *, raw: bool = False) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    return text if raw else json.loads(text)


def _ask(port: int, request: Request) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": request.new_tokens, "ignore_eos": True}
    body = {"rid": request.rid, "input_ids": request.tokens, "sampling_params": sampling, "stream": request.stream}
    timer = None
    if request.abort_after_s is not None:
        timer = threading.Timer(request.abort_after_s, _abort, (port, request.rid))
        timer.start()
    started = time.monotonic()
    status, content = _post(port, body)
    seconds = time.monotonic() - started
    if timer is not None:
        timer.cancel()
    if status != 200:
        return Answer(request.rid, status, [], seconds, full=False, cut=False)
    tokens, reason = _streamed(content) if request.stream else _whole(json.loads(content))
    status = int(reason.get("status_code") or 200)
    aborted = reason["type"] == "abort"
    return Answer(request.rid, status, tokens, seconds, full=not aborted, cut=aborted and status == 200)


def _post(port: int, body: dict[str, Any]) -> tuple[int, str]:
    """Status and content; status 0: the server did not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def _whole(answer: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    return answer.get("output_ids", []), answer["meta_info"]["finish_reason"] or {"type": "none"}


def _streamed(content: str) -> tuple[list[int], dict[str, Any]]:
    """Tokens of a stream of events, each of which repeats what came before it or only adds to it; the last reason."""
    tokens: list[int] = []
    reason: dict[str, Any] = {"type": "none"}
    for line in content.splitlines():
        text = line.removeprefix("data:").strip()
        if not line.startswith("data:") or text == "[DONE]":
            continue
        event = json.loads(text)
        if "error" in event:
            return tokens, {"type": "abort", "status_code": event["error"].get("code", 500)}
        more, reason = _whole(event)
        tokens = more if more[: len(tokens)] == tokens else tokens + more
    return tokens, reason


def _abort(port: int, rid: str) -> None:
    """The server matches requests by the start of their ids: none may be the start of another."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("POST", "/abort_request", json.dumps({"rid": rid}), {"Content-Type": "application/json"})
    connection.getresponse().read()


def _tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randint(*VOCABULARY) for _ in range(count)]

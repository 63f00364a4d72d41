"""An engine's OpenAI API on this machine: scripted answers over real HTTP, streams cut into pieces of any size."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback import listening

Json = dict[str, Any]


@dataclass
class Engine:
    """`chat` and `complete` turn a request into the answer's choice; `statuses` are sent before the first answer.

    `asked` has the POST requests, `got` counts the GETs.
    """

    chat: Callable[[Json], Json] = lambda request: {}
    complete: Callable[[Json], Json] = lambda request: {}
    statuses: list[int] = field(default_factory=list)
    piece: int = 7
    line_end: str = "\n"
    done: bool = True
    models: Json = field(default_factory=lambda: {"data": [{"id": "tiny", "max_model_len": 4096}]})
    asked: list[Json] = field(default_factory=list)
    got: int = 0
    url: str = ""


@contextmanager
def serve(engine: Engine) -> Iterator[Engine]:
    """Run it; `engine.url` is its address."""
    with listening(type("Handler", (_Handler,), {"engine": engine})) as engine.url:
        yield engine


def stream_events(choice: Json, seed: int = 0) -> list[Json]:
    """The deltas of a chat choice: role, content by letters, each call's name and then its arguments in pieces."""
    draw = random.Random(seed)
    message = choice["message"]
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": letter} for letter in message.get("content") or ""]
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        deltas.append(
            {
                "tool_calls": [
                    {"index": index, "id": f"c{index}", "function": {"name": function["name"], "arguments": ""}}
                ]
            }
        )
        rest = function["arguments"]
        while rest:
            size = draw.randint(1, 5)
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": rest[:size]}}]})
            rest = rest[size:]
    events: list[Json] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    return [*events, {"choices": [], "usage": {"total_tokens": 1}}]


class _Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.engine.got += 1
        self.send(200, self.engine.models)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.engine.asked.append({"route": self.path, **request})
        if self.engine.statuses:
            self.send(self.engine.statuses.pop(0), {"error": "busy"})
            return
        if self.path == "/v1/completions":
            self.send(200, {"choices": [self.engine.complete(request)]})
        elif not request.get("stream"):
            self.send(200, {"choices": [self.engine.chat(request)]})
        else:
            self.send_stream(stream_events(self.engine.chat(request)))

    def send(self, status: int, value: Json) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_stream(self, events: list[Json]) -> None:
        end = self.engine.line_end
        text = f": hello{end}{end}" + "".join(
            f"data: {json.dumps(event, ensure_ascii=False)}{end}{end}" for event in events
        )
        body = (text + (f"data: [DONE]{end}{end}" if self.engine.done else "")).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(body), self.engine.piece):
            part = body[start : start + self.engine.piece]
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


def chat_choice(*calls: tuple[str, str], content: str | None = None, reason: str | None = None) -> Json:
    """A choice with tool calls given as name and argument text."""
    tool_calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": text}} for name, text in calls
    ]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls or None}
    return {"index": 0, "message": message, "finish_reason": reason or ("tool_calls" if calls else "stop")}

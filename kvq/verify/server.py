"""A running SGLang or vLLM server, by its OpenAI API. The one place that speaks HTTP to an engine."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import httpx

from kvq.errors import ServerError
from kvq.verify.answers import Answer, Watch, before_stop

BUSY = (429, 502, 503, 504)
TRIES = 4
T = TypeVar("T")
R = TypeVar("R")


class Server:
    """`url` with or without the closing /v1. A context manager; raises ServerError for whatever is no good answer."""

    def __init__(
        self, url: str, *, concurrency: int = 16, timeout: float = 3600.0, key: str = "none", pause: float = 1.0
    ) -> None:
        self.place = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.concurrency = concurrency
        self._pause = pause
        if not self.place.startswith(("http://", "https://")):
            raise ServerError(
                f"{url}: no address of a server. Give one that begins with http:// or https://, such as http://127.0.0.1:30000."
            )
        # Environment proxies are left out: a server to measure is near, and a proxy may hold streams back.
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout, connect=10.0),
            headers={"Authorization": f"Bearer {key}"},
            limits=httpx.Limits(max_connections=concurrency),
            trust_env=False,
        )
        try:
            self.model, self.context = self._first_model()
        except ServerError:
            self._client.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _first_model(self) -> tuple[str, int]:
        listed = self._json("GET", "/models", None)
        try:
            return str(listed["data"][0]["id"]), int(listed["data"][0].get("max_model_len") or 2**31)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise ServerError(f"{self.place}/models lists no model; is this an OpenAI API?") from None

    def post(self, route: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """One JSON request."""
        return self._json("POST", route, {"model": self.model, **payload})

    def stream(self, route: str, payload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of a streamed request, up to [DONE]. A stream without that end raises ServerError."""
        asked = {"model": self.model, **payload, "stream": True}
        try:
            with self._client.stream("POST", self.place + route, json=asked) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise self._refused(route, response)
                for data in events(response.iter_bytes()):
                    if data == "[DONE]":
                        return
                    yield self._event(route, data)
        except httpx.HTTPError as error:
            raise self._silent(route, error) from None
        raise ServerError(f"{self.place}{route}: the stream ended without [DONE]; look at the server's log.")

    def _event(self, route: str, data: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "error" in event:
            raise ServerError(f"{self.place}{route}: the stream holds {data[:200]!r}.")
        return event

    def _json(self, method: str, route: str, payload: Mapping[str, Any] | None) -> dict[str, Any]:
        for attempt in range(1, TRIES + 1):
            try:
                response = self._client.request(method, self.place + route, json=payload)
            except httpx.HTTPError as error:
                raise self._silent(route, error) from None
            if response.status_code not in BUSY or attempt == TRIES:
                break
            time.sleep(self._pause * 2 ** (attempt - 1))
        if response.status_code != httpx.codes.OK:
            raise self._refused(route, response)
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServerError(f"{self.place}{route}: the answer is not a JSON object ({response.text[:120]!r}).")
        return value

    def _refused(self, route: str, response: httpx.Response) -> ServerError:
        return ServerError(
            f"{self.place}{route}: HTTP {response.status_code} ({' '.join(response.text.split())[:200]}). "
            "Look at the server's log."
        )

    def _silent(self, route: str, error: httpx.HTTPError) -> ServerError:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        return ServerError(f"{self.place}{route}: the server did not answer ({reason}). Is it running there?")

    def each(self, work: Callable[[T], R], items: Sequence[T], watch: Watch) -> list[R]:
        """`work` for all items, some at a time, results in order. The first error ends it."""
        results = []
        with ThreadPoolExecutor(max_workers=self.concurrency) as pool:
            try:
                for number, result in enumerate(pool.map(work, items), start=1):
                    watch(f"answer {number}/{len(items)}")
                    results.append(result)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return results


def events(chunks: Iterator[bytes]) -> Iterator[str]:
    """`data` of server-sent events (WHATWG HTML, section 9.2), however the bytes were cut on the way.

    Lines end with CR, LF or both only: JSON text may hold U+2028 and others that str.splitlines() takes for line ends.
    """
    rest, data = b"", list[str]()
    for chunk in chunks:
        rest += chunk
        held = b"\r" if rest.endswith(b"\r") else b""  # its LF may be on the way
        *lines, rest = rest[: len(rest) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        rest += held
        for line in lines:
            if not line and data:
                yield "\n".join(data)
                data = []
            elif line.startswith(b"data:"):
                data.append(line[len(b"data:") :].removeprefix(b" ").decode("utf-8", "replace"))


class ServerAnswerer:
    """Greedy completions of token prompts. `skip_special_tokens` and `stop_token_ids` are the engines' own fields."""

    def __init__(self, server: Server, stop_ids: frozenset[int]) -> None:
        self.server = server
        self.place = server.place
        self.context = server.context
        self._stop_ids = sorted(stop_ids)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str], watch: Watch
    ) -> list[Answer]:
        def ask(prompt: Sequence[int]) -> Answer:
            room = min(max_tokens, self.context - len(prompt))
            if room < 1:
                raise ServerError(f"{self.place}: a prompt of {len(prompt)} tokens leaves no room for an answer.")
            asked = {
                "prompt": list(prompt), "max_tokens": room, "temperature": 0, "skip_special_tokens": False,
                "stop_token_ids": self._stop_ids, **({"stop": list(stop)} if stop else {}),
            }  # fmt: skip
            choice = self._choice(self.server.post("/completions", asked))
            text, reason = choice.get("text"), choice.get("finish_reason")
            if not isinstance(text, str) or reason not in ("stop", "length"):
                raise ServerError(f"{self.place}/completions: neither stopped nor reached its limit ({reason!r}).")
            return Answer(before_stop(text, stop), cut=reason == "length")

        return self.server.each(ask, prompts, watch)

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], watch: Watch) -> list[tuple[float, bool]]:
        def ask(pair: tuple[Sequence[int], Sequence[int]]) -> tuple[float, bool]:
            prompt, continuation = pair
            asked = {"prompt": [*prompt, *continuation], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
            choice = self._choice(self.server.post("/completions", asked))
            wanted = slice(len(prompt), len(prompt) + len(continuation))
            try:
                chosen = [float(value) for value in choice["logprobs"]["token_logprobs"][wanted]]
                best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][wanted]]
            except (KeyError, TypeError, ValueError, AttributeError):
                chosen = best = []
            if len(chosen) != len(continuation) or len(best) != len(continuation):
                raise ServerError(
                    f"{self.place}/completions: gives no log probabilities of the prompt (`echo` with `logprobs`)."
                )
            return sum(chosen), chosen == best

        return self.server.each(ask, pairs, watch)

    def _choice(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise ServerError(f"{self.place}/completions: the answer holds no choice.")
        return choices[0]

"""A SGLang server as a process of its own: start it, ask it, stop it. Only the standard library."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PORT = 30111
LOG_TAIL = 2500
ROOT = Path(__file__).resolve().parents[2]


class ServerDiedError(Exception):
    """The server ended or did not answer in time; the message ends with its log."""


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Command-line flags: true is a bare flag, a list several words; false and None are left out."""
    words = []
    for key, value in settings.items():
        if value is None or value is False:
            continue
        words.append(f"--{key}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return words


def kvq(command: str, *arguments: object) -> int:
    """Run kvq of this repository; its words go where ours go."""
    words = [sys.executable, "-m", "kvq", command, *map(str, arguments)]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


def server_command(settings: Mapping[str, Any], config: Path | None, port: int = PORT) -> list[str]:
    """`settings` win over the YAML `config`."""
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port)]
    return [*command, *(["--config", str(config)] if config else []), *flags(settings)]


@contextmanager
def serving(
    settings: Mapping[str, Any], log: Path, environment: Mapping[str, str] | None = None, *,
    config: Path | None = None, wait_s: float = 300, port: int = PORT,
) -> Iterator[float]:  # fmt: skip
    """A server that answers, and the seconds that it took to get there. `settings` win over the YAML `config`."""
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            server_command(settings, config, port), env={**os.environ, **(environment or {})}, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _wait(process, log, started + wait_s, port)
        yield time.monotonic() - started
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the group that this function made
        process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path, deadline: float, port: int) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerDiedError(f"exit {process.returncode}: {_tail(log)}")
        try:
            ask({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}, 120, port)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise ServerDiedError(f"no answer in time: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]


def ask(body: Mapping[str, Any], timeout: float = 300, port: int = PORT) -> Any:
    """The server's answer to one /generate."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


def ask_all(bodies: list[dict[str, Any]], at_once: int, port: int = PORT) -> list[tuple[float, Any]]:
    """Seconds and answer of each request, `at_once` of them in flight."""

    def timed(body: dict[str, Any]) -> tuple[float, Any]:
        started = time.monotonic()
        answer = ask(body, port=port)
        return time.monotonic() - started, answer

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(timed, bodies))

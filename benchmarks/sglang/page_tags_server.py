"""A SGLang server with kvq's plugin in reach, as a process of its own. Only the standard library.

SGLang finds plugins by the metadata of installed distributions. Where kvq is not installed, `entry_point` writes just
that metadata from pyproject.toml, and puts it and the repository on the server's path.
"""

import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 290
LOG_TAIL = 3000


class ServerDiedError(Exception):
    """The server ended, or did not answer in time; the message ends with its log."""


def entry_point(folder: Path) -> str:
    """PYTHONPATH with kvq's entry points and its code on it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = folder / "kvq-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvq\nVersion: 0\n", encoding="utf-8")
    points = project["entry-points"]["sglang.srt.plugins"]
    lines = ["[sglang.srt.plugins]", *(f"{name} = {target}" for name, target in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Command-line flags: true is a bare flag, a list several words; false and None are left out."""
    words = []
    for key, value in settings.items():
        if value is None or value is False:
            continue
        words.append(f"--{key}")
        words += map(str, value) if isinstance(value, list) else [] if value is True else [str(value)]
    return words


@contextmanager
def serving(settings: Mapping[str, Any], log: Path, tags: Mapping[str, str], port: int) -> Iterator[None]:
    """A server that answers on this port. `tags` is added to its environment."""
    environment = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", **os.environ, "PYTHONPATH": entry_point(log.parent / "plugin")}
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(port), *flags(settings)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**environment, **tags}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(process, log, port)
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the group that this function made
        process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path, port: int) -> None:
    deadline = time.monotonic() + START_S
    body = b'{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}'
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerDiedError(f"exit {process.returncode}: {_tail(log)}")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=120).read()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise ServerDiedError(f"no answer in {START_S} s: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]

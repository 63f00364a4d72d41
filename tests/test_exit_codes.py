"""docs/exit-codes.md and the README say what kvq/errors.py does."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import kvq
from kvq import cli, errors
from kvq.errors import KvqError, StoppedError, exit_code_of
from kvq.publish.events import open_events
from kvq.stop import INTERRUPTED_WORDS, SIGNALS, StopRequest, Terminated, end_with_words
from tests.checkpoints import make_checkpoint
from tests.conftest import Kvq

ROOT = Path(kvq.__file__).parent.parent
ROW = re.compile(r"^\| (\d+) \| (\w*) ?\| (.+?) \| (.+?) \|$", re.M)
CLASSES = [found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, KvqError)]


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


def documented() -> list[tuple[int, str]]:
    text = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    return [(int(code), name) for code, name, *_ in ROW.findall(text)]


def test_the_table_is_that_of_the_code() -> None:
    plain = [(found.exit_code, found.__name__) for found in CLASSES if found is not StoppedError]
    stopped = [(StoppedError("", number).exit_code, "StoppedError") for number in (signal.SIGINT, signal.SIGTERM)]
    assert documented() == sorted([*plain, *stopped, (0, ""), (errors.OUT_OF_MEMORY, "")])


def test_the_tree_in_the_docstring_is_that_of_the_code() -> None:
    tree = re.findall(r"(\w+Error) +(\d+)", errors.__doc__ or "")
    assert {(int(code), name) for name, code in tree} == {row for row in documented() if row[1] and row[0] != 143}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 9),
        (OutOfMemoryError("CUDA"), 9),
        (OSError(28, "No space left"), 7),
        (RuntimeError("a mistake"), 1),
        (errors.HubError("x"), 8),
        (StoppedError("x", signal.SIGTERM), 143),
    ],
)
def test_other_errors(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.fixture
def words() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_with_words()
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@pytest.mark.usefixtures("words")
def test_sigterm_where_nothing_waits_for_a_step_ends_the_command_with_words() -> None:
    """Within a StopRequest it stays a request."""
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.signal == signal.SIGTERM
    with pytest.raises(Terminated) as caught:
        os.kill(os.getpid(), signal.SIGTERM)
    error = caught.value.as_error()
    assert exit_code_of(error) == 143 and "stopped by SIGTERM" in str(error)


@pytest.mark.usefixtures("words")
def test_sigterm_is_no_error_of_the_code_that_it_comes_into() -> None:
    with pytest.raises(Terminated):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception as error:
            raise ModuleNotFoundError("Could not import module") from error


@pytest.mark.usefixtures("words")
def test_a_swallowed_sigterm_is_still_asked_of_the_steps() -> None:
    with suppress(BaseException):
        os.kill(os.getpid(), signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.signal == signal.SIGTERM


def test_a_signal_with_a_screen_that_is_gone_is_still_a_request() -> None:
    text = (
        "import os, signal\nfrom kvq.stop import StopRequest\nos.close(2)\n"
        "with StopRequest() as stop:\n    os.kill(os.getpid(), signal.SIGTERM)\n    print(stop.signal)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{signal.SIGTERM.value}\n")


def test_a_second_sigterm_ends_the_process_at_once() -> None:
    text = (
        "import os, signal\nfrom kvq.stop import end_with_words\nend_with_words()\n"
        "for _ in range(2):\n    try:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    except BaseException:\n        print('once', flush=True)\nprint('never')\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "once\n")


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("module", ["kvq.cli", "numpy.dtypes", "transformers.modeling_utils"])
def test_a_signal_in_the_middle_of_an_import_ends_a_command_with_words(
    module: str, name: str, code: int, tmp_path: Path
) -> None:
    """Raised there it was swallowed by torch's bare `except:`, and numpy was left half imported (CI, 2026-11-30)."""
    text = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where a shell started the tests with `&`
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        f"            os.kill(os.getpid(), signal.{name})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from kvq.__main__ import main\nmain()\n"
    )
    source = make_checkpoint(tmp_path / "source", "kimi_k2")
    arguments = ["quantize", str(source), "--out", str(tmp_path / "out"), "--events", str(tmp_path / "events")]
    done = subprocess.run([sys.executable, "-c", text, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    words = {"SIGTERM": "stopped by SIGTERM. What is finished is kept", "SIGINT": "interrupted. A quantization goes on"}
    assert done.stderr.splitlines()[-1].startswith(f"kvq: {words[name]}"), done.stderr


def test_the_event_log_tells_of_a_sigterm_between_the_steps(tmp_path: Path) -> None:
    with pytest.raises(Terminated), open_events(tmp_path / "events", "quantize"):
        raise Terminated
    last = json.loads((tmp_path / "events").read_text().splitlines()[-1])
    assert (last["event"], last["exit_code"], last["signal"]) == ("run_stopped", 143, "SIGTERM")


def test_a_signal_in_a_finalizer_is_not_forgotten() -> None:
    text = (
        "import os, signal, weakref\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvq.stop import end_with_words\nend_with_words()\n"
        "class Held: pass\nheld = Held()\nweakref.finalize(held, os.kill, os.getpid(), signal.SIGINT)\n"
        "del held\nprint('never')\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "") and done.stderr.startswith("kvq: interrupted.")


def test_ctrl_c_before_typer_looks_out_for_it(kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupt)
    said = kvq_main("models")
    assert (said.code, said.err) == (130, INTERRUPTED_WORDS)


@pytest.mark.parametrize(("arguments", "code", "screen"), [
    *[("inspect nope", 3, screen) for screen in ("2>&-", "2>/dev/full", "2>/dev/null", ">&- 2>&-", "<&- >&- 2>&-")],
    ("models --nonsense", 2, "2>&-"), ("models --nonsense", 2, ">&- 2>&-"),
])  # fmt: skip
def test_a_code_does_not_depend_on_the_screen(arguments: str, code: int, screen: str, tmp_path: Path) -> None:
    line = f'exec "{sys.executable}" -m kvq {arguments} {screen}'
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == code


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_screen_that_has_few_signs(encoding: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-m", "kvq", "models"], env=environment, capture_output=True, check=False)
    assert done.returncode == 0 and "glm-5.2" in done.stdout.decode(encoding)

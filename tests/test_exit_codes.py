"""docs/exit-codes.md and the README say what kvq/errors.py does."""

import os
import re
import signal
from pathlib import Path

import pytest

import kvq
from kvq import errors
from kvq.errors import KvqError, StoppedError, exit_code_of
from kvq.stop import StopRequest, end_with_words

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


def test_sigterm_where_nothing_waits_for_a_step_is_an_error_with_words() -> None:
    """Within a StopRequest it stays a request; a second one ends the process as ever."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        end_with_words()
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(StoppedError, match="stopped by SIGTERM") as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert exit_code_of(caught.value) == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)

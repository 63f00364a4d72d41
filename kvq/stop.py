"""SIGINT and SIGTERM as a request: the step at work is finished first. A second signal ends at once.

Where there are no steps a signal ends the command with a sentence: raised as an exception that closes what is open, or,
while modules are being imported, at once.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from kvq.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED_WORDS = "kvq: interrupted. A quantization goes on from its last finished layer with the same command.\n"


class Terminated(BaseException):
    """SIGTERM came where no steps are counted. Not an Exception: other people's code takes those for its own errors."""

    def as_error(self) -> StoppedError:
        """What is said of it, with exit code 143."""
        return StoppedError("stopped by SIGTERM. What is finished is kept; run the same command again.", signal.SIGTERM)


class _EndWithWords:
    """The handler of both signals where there are no steps.

    A second SIGTERM ends the process at once, as if there were no handler.
    """

    def __init__(self) -> None:
        self.terminated = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self.terminated:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.terminated = self.terminated or number == signal.SIGTERM
        _end_if_importing(number, frame)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _end_if_importing(number: int, frame: FrameType | None) -> None:
    """End the process where modules are being imported: nothing may be raised there.

    torch tries imports with a bare `except:` and goes on with a module half imported; from its C++ parts an exception
    aborts the process. A kill is safe at any point, so this is; only what is open stays as a kill leaves it.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _end(number)
        frame = frame.f_back


def _end_where_nothing_is_raised(unraisable: "sys.UnraisableHookArgs") -> None:
    """A signal that came into a finalizer would be printed, and forgotten."""
    if isinstance(unraisable.exc_value, Terminated):
        _end(signal.SIGTERM)
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _end(signal.SIGINT)
    sys.__unraisablehook__(unraisable)


def _end(number: int) -> NoReturn:
    _say(INTERRUPTED_WORDS if number == signal.SIGINT else f"kvq: {Terminated().as_error()}\n")
    os._exit(128 + number)


def _say(text: str) -> None:
    with suppress(OSError):  # of a closed screen, or a pipe without a reader: raised here it would hit the step at work
        os.write(2, text.encode())


def end_with_words() -> None:
    """From now on SIGINT and SIGTERM end a command with a sentence, 130 or 143, wherever they come.

    Left alone are a handler that is there already (a notebook's, a test's) and threads other than the main one.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    sys.unraisablehook = _end_where_nothing_is_raised
    handler = _EndWithWords()
    for number, usual in zip(SIGNALS, (signal.default_int_handler, signal.SIG_DFL), strict=True):
        if signal.getsignal(number) is usual:
            signal.signal(number, handler)


class StopRequest:
    """Catches the signals while it is open; `signal` is the number that came, if one did."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        before = self._before[signal.SIGTERM]
        if isinstance(before, _EndWithWords) and before.terminated:  # somebody's bare `except:` has swallowed it
            self.signal = signal.SIGTERM
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            _end_if_importing(number, frame)
            raise KeyboardInterrupt
        self.signal = number
        _say("kvq: stopping when this step is finished; a second signal stops at once\n")

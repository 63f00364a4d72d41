"""SIGINT and SIGTERM as a request: the step at work is finished first. A second signal ends at once.

Where there are no steps SIGTERM is an error like others, with a message, as SIGINT is Python's own KeyboardInterrupt.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from kvq.errors import StoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_with_words() -> None:
    """From now on SIGTERM raises StoppedError in the main thread; a second one ends the process at once."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _raise)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise StoppedError("stopped by SIGTERM. What is finished is kept; run the same command again.", number)


class StopRequest:
    """Catches the signals while it is open; `signal` is the number that came, if one did."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        os.write(2, b"kvq: stopping when this step is finished; a second signal stops at once\n")

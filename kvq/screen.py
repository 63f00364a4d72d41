"""The three standard files, where one is closed or cannot be written: an exit code must not depend on it."""

import io
import os
import sys
from contextlib import suppress


def prepare_standard_files() -> None:
    """Files that take whatever is written.

    A closed one becomes /dev/null: the next file opened would take its number, and what is meant for the screen. A sign
    that a screen's encoding has not is written as an escape.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")


def tell(text: str) -> None:
    """On standard error, if that takes it. What it refused is given up, or Python would end with 120 for it."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

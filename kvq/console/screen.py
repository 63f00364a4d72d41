"""Where words go, and how sizes and times are written. Words on stderr, results on stdout."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

# No markup: names of files and tensors come from outside and may hold square brackets.
OUT = Console(highlight=False, soft_wrap=True, markup=False)
ERR = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
LINE_SECONDS = 10.0


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Where long work says what it is at: a spinner on a terminal, elsewhere a line every ten seconds for the log."""
    if ERR.is_terminal:
        with ERR.status("reading", spinner="line") as status:
            yield status.update
        return
    said = time.monotonic()

    def line(text: str) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            ERR.print(text)

    yield line


def size(num_bytes: float) -> str:
    """Both units, as sizes of the same model are quoted in either: `22.73 MB (21.68 MiB)`."""
    for decimal, binary, name, other in (
        (1e9, 2**30, "GB", "GiB"),
        (1e6, 2**20, "MB", "MiB"),
        (1e3, 2**10, "kB", "KiB"),
    ):
        if num_bytes >= decimal:
            return f"{num_bytes / decimal:.2f} {name} ({num_bytes / binary:.2f} {other})"
    return f"{num_bytes:.0f} B"


def short_size(num_bytes: float) -> str:
    """Decimal unit only, for tables."""
    return size(num_bytes).split(" (")[0]


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"

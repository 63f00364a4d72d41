"""What is given to a reader, and how."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.hostile import document


@dataclass(frozen=True)
class Target:
    """`make` gives an input, `read` takes it; `folder` is all that it may touch; `share` of the inputs are its own."""

    name: str
    folder: Path
    make: Callable[[Random], Any]
    read: Callable[[Any], object]
    share: float


def near(base: Any) -> Callable[[Random], bytes]:
    return lambda draw: document(draw, base)


def writes(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    """Put the input into a file, then read it as kvq does."""

    def one(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    return one

"""Answers of a model, wherever it runs: in this process or behind an OpenAI API."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Watch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy text up to what ended it; `cut` means that the limit of tokens ended it."""

    text: str
    cut: bool


class Answerer(Protocol):
    """A model that answers. Prompts are token ids, so that no server adds or reads anything on its own."""

    @property
    def place(self) -> str:
        """The folder or address, for messages."""

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together at most."""

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str], watch: Watch
    ) -> list[Answer]:
        """Greedy answers. A `stop` text ends one and is not part of it."""

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], watch: Watch) -> list[tuple[float, bool]]:
        """For each prompt and continuation: its log probability, and whether it is the greedy one."""


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Text up to the first of the stop texts."""
    found = [place for mark in stop if mark and (place := text.find(mark)) >= 0]
    return text[: min(found)] if found else text

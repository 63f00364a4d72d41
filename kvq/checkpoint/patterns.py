"""The one place where patterns from a config are matched: names, and regular expressions behind `re:`.

A pattern is a stranger's program. `regex` understands what `re` does and can give up: `(a+)+$` would run for hours.
"""

import math
import re
import time
from collections.abc import Collection, Iterable

import regex

from kvq.errors import CheckpointError

REGEX = "re:"
SECONDS = 20.0  # for all patterns and names; an honest pattern needs a microsecond for a name
MAX_LENGTH = 10_000
MAX_REPEATS = 10_000
REPETITION = re.compile(r"\{(\d{0,9}),?(\d{0,9})\d*\}")


def check_patterns(entries: Iterable[str], place: object) -> None:
    """Raise CheckpointError for an entry whose expression is none."""
    for entry in entries:
        problem = pattern_problem(entry)
        if problem:
            raise CheckpointError(f"{place}: names modules by {entry[:200]!r}: {problem}. Download it again.")


def pattern_problem(entry: str) -> str | None:
    """What is wrong with an entry's expression; None for a good one and for a plain name."""
    if not entry.startswith(REGEX):
        return None
    if len(entry) > MAX_LENGTH:
        return f"the expression has {len(entry)} characters, more than {MAX_LENGTH}"
    pattern = entry.removeprefix(REGEX)
    try:
        re.compile(pattern)  # before `regex`, which also knows recursion
        if _repeats(pattern) > MAX_REPEATS:
            return f"its repetitions multiply to more than {MAX_REPEATS}"
        regex.compile(pattern)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
        return f"no regular expression ({error})"
    return None


def _repeats(pattern: str) -> int:
    """Product of all counts in braces: `regex` writes each repetition out, `((a{99}){99}){99}` a million times."""
    return math.prod(max(1, *map(int, filter(None, counts))) for counts in REPETITION.findall(pattern))


def matching(entries: Iterable[str], modules: Collection[str]) -> dict[str, set[str]]:
    """Each entry -> the modules that it means, by compressed-tensors' rule for targets and ignore lists: the full name,
    or `re:` and a pattern from its start.

    Raises CheckpointError for patterns that do not come to an end.
    """
    end = time.monotonic() + SECONDS
    return {entry: _matching(entry, modules, end) for entry in entries}


def _matching(entry: str, modules: Collection[str], end: float) -> set[str]:
    if not entry.startswith(REGEX):
        return {entry}.intersection(modules)
    if pattern_problem(entry):
        return set()
    pattern = regex.compile(entry.removeprefix(REGEX))
    try:
        return {name for name in modules if pattern.match(name, timeout=max(1e-3, end - time.monotonic()))}
    except TimeoutError:
        raise CheckpointError(
            f"config.json: matching {entry[:200]!r} with {len(modules)} names takes more than {SECONDS:.0f} seconds. "
            "Write a pattern without nested repetitions."
        ) from None

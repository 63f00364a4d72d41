"""Sizes that ruff does not check."""

from pathlib import Path

import kvq

PACKAGE = Path(kvq.__file__).parent
MAX_LINES = 400


def python_files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *Path(__file__).parent.rglob("*.py")])


def test_files_are_short() -> None:
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {path: count for path, count in lengths.items() if count > MAX_LINES} == {}


def test_no_drawer_for_odds_and_ends() -> None:
    assert [path for path in python_files() if path.stem in ("utils", "util", "helpers", "misc", "common")] == []


def test_plain_ascii() -> None:
    """The plus-minus sign that the console prints is written as an escape."""
    odd = {
        str(path): sorted({sign for sign in path.read_text(encoding="utf-8") if not sign.isascii()})
        for path in PACKAGE.rglob("*.py")
        if not path.read_text(encoding="utf-8").isascii()
    }
    assert odd == {}

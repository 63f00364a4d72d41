"""What the documents name is there: paths, commands, flags, and every package in the README's map."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import kvq
from kvq.cli import app

ROOT = Path(__file__).parent.parent
PACKAGE = Path(kvq.__file__).parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/README.md"), *ROOT.glob("benchmarks/*/*.md")]
)
PATH = re.compile(r"(?<![\w./:-])[\w.-]+(?:/[\w.-]+)+")
CODE = re.compile(r"`([^`]+)`|^ {4,}(\S.*)$", re.MULTILINE)
CALL = re.compile(r"\bkvq (?P<command>[a-z][a-z-]*)(?P<rest>[^|;#]*)")
FLAG = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def named_paths(text: str) -> Iterator[str]:
    """Paths that begin in this repository or in the package; those of outputs and other projects begin elsewhere."""
    starts = {path.name for path in (*ROOT.iterdir(), *PACKAGE.iterdir()) if path.is_dir()} - {"build", "dist"}
    for match in PATH.finditer(text):
        path = match.group().rstrip(".")
        if path.split("/")[0] in starts:
            yield path


def calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """Commands and the flags that stand behind them, in code."""
    for inline, block in CODE.findall(text.replace("\\\n", " ")):
        for call in CALL.finditer(" ".join((inline or block).split(" #")[0].split())):
            yield call["command"], FLAG.findall(call["rest"])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_exist(document: Path) -> None:
    named = set(named_paths(document.read_text(encoding="utf-8")))
    lost = {path for path in named if not (ROOT / path).exists() and not (PACKAGE / path).exists()}
    assert lost == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_flags_exist(document: Path) -> None:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    commands = group.commands
    for name, flags in calls(document.read_text(encoding="utf-8")):
        if name not in commands:
            assert not flags, f"kvq {name} {flags}"
            continue
        known = {option for parameter in commands[name].params for option in parameter.opts + parameter.secondary_opts}
        assert set(flags) - known - {"--help"} == set(), f"kvq {name}"


def test_the_map_is_complete() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    mapped = set(re.findall(r"kvq/(\w+)(?:/|\.py)", readme.split("## Map")[1]))
    parts = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert parts - {"__init__", "__main__", "__pycache__"} <= mapped


def test_every_document_is_in_the_map() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").split("## Map")[1]
    assert [path.name for path in ROOT.glob("docs/*.md") if path.stem not in readme] == []

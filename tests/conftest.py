"""Fixtures for tests of the whole: shared checkpoints, and `kvq`'s own main with what it printed."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvq.cli import main
from tests.runs import Shared


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    return Shared(tmp_path_factory.mktemp("shared"))


@dataclass(frozen=True)
class Said:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Kvq = Callable[..., Said]


@pytest.fixture
def kvq_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvq:
    """Calls the entry point in this process; no option of pytest's terminal gets through."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["kvq", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        code = stopped.value.code
        return Said(code if isinstance(code, int) else 0, printed.out, printed.err)

    return call

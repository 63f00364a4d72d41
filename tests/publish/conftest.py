"""Fixtures of the tests that send: a folder that may be sent, and a Hub that takes it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.client import point_client
from tests.hub.folder import add_report_and_card
from tests.hub.server import Hub, serve
from tests.runs import Shared


@pytest.fixture
def folder(shared: Shared, tmp_path: Path) -> Path:
    """A copy: it may be damaged."""
    return add_report_and_card(shared.copy(shared.output("kimi-k2"), tmp_path / "model-int4"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serve(Hub()) as hub:
        point_client(hub, monkeypatch, tmp_path / "home")
        yield hub

"""`kvq upload` against a Hub of the tests: what arrives, in what order, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvq.checkpoint.index import INDEX_NAME
from kvq.errors import HubError
from kvq.publish.bundle import CARD, DISTANCE, LAST, LOADABLE, Bundle, make_bundle, mark_card
from kvq.publish.upload import Target, Uploaded, upload
from tests.hub.client import point_client
from tests.hub.faults import Faults
from tests.hub.server import Hub, serve
from tests.hub.store import Tree
from tests.runs import Shared

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own, of httpx
REPO = "owner/model-int4"
CARD_TEXT = "---\nlicense: mit\n---\n# A model\n"


class Notes:
    """Progress that is kept."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.files: list[tuple[str, int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def sent(self, file: str, done_bytes: int, total_bytes: int) -> None:
        self.files.append((file, done_bytes, total_bytes))


@pytest.fixture
def folder(shared: Shared, tmp_path: Path) -> Path:
    """An output with its report and card."""
    copy = shared.copy(shared.output("kimi-k2"), tmp_path / "model-int4")
    (copy / "kvq-reports").mkdir()
    (copy / DISTANCE).write_text(json.dumps({"schema": "kvq.distance/1", "mean_kl": 0.1}))
    (copy / CARD).write_text(CARD_TEXT)
    return copy


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serve(Hub()) as hub:
        point_client(hub, monkeypatch, tmp_path / "home")
        yield hub


def send(folder: Path, notes: Notes | None = None, **options: object) -> Uploaded:
    return upload(make_bundle(folder), Target(repo=REPO, **options), notes or Notes())  # type: ignore[arg-type]


def trees(hub: Hub, branch: str = "main") -> list[Tree]:
    return [tree for name, _, tree in hub.store.repos[REPO].history if name == branch]


def assert_whole(hub: Hub, bundle: Bundle, result: Uploaded) -> None:
    tree = hub.store.repos[REPO].commits[result.revision]
    assert tree.keys() - {".gitattributes"} == bundle.files.keys()
    for path, file in bundle.files.items():
        content = file.content if isinstance(file.content, bytes) else file.content.read_bytes()
        assert tree[path].data == content, path


def test_a_folder_arrives_whole(hub: Hub, folder: Path) -> None:
    notes, bundle = Notes(), make_bundle(folder)
    result = send(folder, notes)
    assert_whole(hub, bundle, result)
    assert result.num_files == len(bundle.files) == result.sent_files
    assert notes.files[-1][1] == notes.files[-1][2] == result.sent_bytes == result.num_bytes
    assert hub.store.repos[REPO].resolve("main") == result.revision
    assert any("/content/" in line and line.endswith("/2") for line in hub.asked), "nothing was sent in several parts"

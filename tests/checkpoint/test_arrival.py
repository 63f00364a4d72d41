"""What arrives from a Hub of the tests is what the Hub says it is, through the unmodified client."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvq.checkpoint import arrival
from kvq.checkpoint.arrival import check_arrival
from kvq.checkpoint.hashing import git_blob_sha1
from kvq.checkpoint.source import download
from kvq.errors import HubError
from tests.hub.client import point_client
from tests.hub.faults import Faults
from tests.hub.server import Hub, serve
from tests.hub.store import Stored

REPO = "owner/source"
FILES = {
    "config.json": b"{}",
    "empty.txt": b"",
    "sub/notes.txt": b"notes\n" * 40,
    "model-00001-of-00002.safetensors": bytes(range(256)) * 30,
    "model-00002-of-00002.safetensors": bytes(reversed(range(256))) * 50,
    **{f"chapter-{number:02d}.txt": b"text" * number for number in range(12)},
}
COMMIT = "c" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serve(Hub()) as hub:
        point_client(hub, monkeypatch, tmp_path / "home", token="")
        hub.store.create(REPO, private=False)
        tree = {
            name: Stored(data, hashlib.sha256(data).hexdigest() if name.endswith(".safetensors") else None)
            for name, data in FILES.items()
        }
        hub.store.repos[REPO].add_commit("main", "files", tree)
        yield hub


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize("in_folder", [True, False])
def test_everything_arrives(hub: Hub, tmp_path: Path, in_folder: bool) -> None:
    seen: list[tuple[int, int]] = []
    source = download(REPO, None, tmp_path / "here" if in_folder else None, quiet, lambda *state: seen.append(state))
    assert source.revision == hub.store.repos[REPO].branches["main"]
    assert {name: (source.folder / name).read_bytes() for name in FILES} == FILES
    assert seen[-1] == (sum(map(len, FILES.values())),) * 2


@pytest.mark.parametrize("seed", range(3))
def test_a_third_of_all_requests_fails(hub: Hub, tmp_path: Path, seed: int) -> None:
    hub.faults = Faults(rate=0.35, seed=seed)
    source = download(REPO, None, tmp_path / "here", quiet)
    assert {name: (source.folder / name).read_bytes() for name in FILES} == FILES
    assert hub.faults.met.total() >= 0.25 * hub.faults.requests


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_content_of_another_hash(hub: Hub, tmp_path: Path, name: str) -> None:
    """A cache or a proxy that gives other bytes of the same length."""
    tree = hub.store.repos[REPO].commits[hub.store.repos[REPO].branches["main"]]
    good = tree[name]
    damaged = bytes([good.data[0] ^ 1]) + good.data[1:]
    hub.replaced[name] = damaged
    with pytest.raises(HubError, match=rf"{name} arrived damaged \(the Hub says (sha256|git hash) .*Remove .*{name}"):
        download(REPO, None, tmp_path / "here", quiet)
    del hub.replaced[name]
    (tmp_path / "here" / name).unlink()
    assert (download(REPO, None, tmp_path / "here", quiet).folder / name).read_bytes() == good.data


def listing() -> list[SimpleNamespace]:
    return [
        SimpleNamespace(rfilename=name, size=len(data), blob_id=git_blob_sha1([data], len(data)), lfs=None)
        for name, data in FILES.items()
    ]


@pytest.fixture
def arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    for name, data in FILES.items():
        path = tmp_path / "here" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "here"


def test_what_was_right_is_not_hashed_again(arrived: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = arrival.digest_of

    def counted(path: Path, is_lfs: bool) -> str:
        hashed.append(path.name)
        return real(path, is_lfs)

    monkeypatch.setattr(arrival, "digest_of", counted)
    check_arrival(REPO, COMMIT, arrived, listing())
    assert len(hashed) == len(FILES)
    check_arrival(REPO, COMMIT, arrived, listing())
    assert len(hashed) == len(FILES)
    changed = arrived / "config.json"
    changed.write_bytes(b"[]")
    with pytest.raises(HubError, match=r"config\.json arrived damaged"):
        check_arrival(REPO, COMMIT, arrived, listing())
    assert len(hashed) == len(FILES) + 1


def test_a_memory_that_is_damaged_is_forgotten(arrived: Path, tmp_path: Path) -> None:
    check_arrival(REPO, COMMIT, arrived, listing())
    (memory,) = (tmp_path / "home").rglob("*.json")
    for text in ("not JSON", "[1]", '{"x": 1}'):
        memory.write_text(text)
        check_arrival(REPO, COMMIT, arrived, listing())


def test_missing_short_and_strange(arrived: Path) -> None:
    (arrived / "empty.txt").unlink()
    with pytest.raises(HubError, match=r"empty\.txt has not arrived"):
        check_arrival(REPO, COMMIT, arrived, listing())
    (arrived / "empty.txt").write_bytes(b"x")
    with pytest.raises(HubError, match=r"empty\.txt arrived damaged \(1 bytes, the Hub says 0\)"):
        check_arrival(REPO, COMMIT, arrived, listing())
    for name in ("/etc/hostname", "../here/config.json"):
        row = SimpleNamespace(rfilename=name, size=1, blob_id="0", lfs=None)
        with pytest.raises(HubError, match="leads out of the folder"):
            check_arrival(REPO, COMMIT, arrived, [row])
    row = SimpleNamespace(rfilename="config.json", size=None, blob_id=None, lfs=None)
    with pytest.raises(HubError, match=r"states no size or hash of config\.json"):
        check_arrival(REPO, COMMIT, arrived, [row])


def test_git_hash_is_gits_own() -> None:
    assert git_blob_sha1([b"hello", b" world\n"], 12) == "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"

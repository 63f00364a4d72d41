"""An upload against a Hub of the tests: what arrives, in what order, what is refused, and what happens under faults."""

import signal
import time
from pathlib import Path

import pytest

from kvq.checkpoint.index import INDEX_NAME
from kvq.errors import HubError, OutputError, StoppedError
from kvq.publish import upload as module
from kvq.publish.bundle import LAST, LOADABLE, Bundle, make_bundle, mark_card
from kvq.publish.card_metadata import CARD
from kvq.publish.upload import Target, Uploaded, batches, upload
from kvq.stop import StopRequest
from tests.hub.faults import Faults, Kind
from tests.hub.folder import CARD_TEXT
from tests.hub.server import Hub
from tests.hub.store import Stored, Tree

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own, of httpx
REPO = "owner/model-int4"


class Notes:
    """Progress that is kept."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.files: list[tuple[str, int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def sent(self, file: str, done_bytes: int, total_bytes: int) -> None:
        self.files.append((file, done_bytes, total_bytes))


def send(folder: Path, notes: Notes | None = None, target: Target | None = None) -> Uploaded:
    return upload(make_bundle(folder), target or Target(repo=REPO), notes or Notes())


def trees(hub: Hub, branch: str = "main") -> list[Tree]:
    """Every state that a reader of the branch could have met."""
    return [tree for name, _, tree in hub.store.repos[REPO].history if name == branch]


def holds(tree: Tree, bundle: Bundle, path: str) -> bool:
    content = bundle.files[path].content
    return path in tree and tree[path].data == (content if isinstance(content, bytes) else content.read_bytes())


def assert_whole(hub: Hub, bundle: Bundle, result: Uploaded) -> None:
    tree = hub.store.repos[REPO].commits[result.revision]
    assert hub.store.repos[REPO].branches["main"] == result.revision
    assert tree.keys() - {".gitattributes"} == bundle.files.keys()
    assert [path for path in bundle.files if not holds(tree, bundle, path)] == []


def assert_never_half_loadable(hub: Hub, bundle: Bundle, branch: str = "main") -> None:
    """Where a state has the config or the index of this bundle, it has all of this bundle's weights."""
    weights = [file.path for file in bundle.early]
    for tree in trees(hub, branch):
        if any(holds(tree, bundle, path) for path in LOADABLE):
            assert [path for path in weights if not holds(tree, bundle, path)] == []


def test_a_folder_arrives_whole(hub: Hub, folder: Path) -> None:
    notes, bundle = Notes(), make_bundle(folder)
    result = send(folder, notes)
    assert_whole(hub, bundle, result)
    assert_never_half_loadable(hub, bundle)
    assert result.num_files == len(bundle.files) == result.sent_files
    assert notes.files[-1][1] == notes.files[-1][2] == result.sent_bytes == result.num_bytes
    assert [done for _, done, _ in notes.files] == sorted(done for _, done, _ in notes.files)
    assert any("/content/" in line and line.endswith("/2") for line in hub.asked), "nothing was sent in several parts"
    assert set(trees(hub)[-1]) - set(trees(hub)[-2]) == set(LAST)


def test_what_is_there_is_not_sent_again(hub: Hub, folder: Path) -> None:
    first = send(folder)
    received, commits = hub.store.received_bytes, len(trees(hub))
    again = send(folder)
    assert (again.revision, again.sent_files, again.sent_bytes) == (first.revision, 0, 0)
    assert (hub.store.received_bytes, len(trees(hub))) == (received, commits)
    (folder / CARD).write_text(CARD_TEXT + "more\n")
    changed = send(folder)
    assert changed.sent_files == 1 and len(trees(hub)) == commits + 1


@pytest.mark.parametrize("seed", range(4))
def test_a_third_of_all_requests_fails(hub: Hub, folder: Path, seed: int) -> None:
    """It ends whole, or says what failed and a later call goes on; no state in between can be loaded."""
    hub.faults = Faults(rate=0.35, seed=seed)
    bundle, notes, failures = make_bundle(folder), Notes(), []
    for _ in range(5):
        try:
            result = send(folder, notes)
            break
        except HubError as error:
            assert "the same command goes on" in str(error) and str(error).count("\n") == 0
            failures.append(str(error))
    assert_whole(hub, bundle, result)
    assert_never_half_loadable(hub, bundle)
    assert hub.faults.met.total() >= 0.25 * hub.faults.requests and len(hub.faults.met) >= 4
    assert len(failures) <= 2


@pytest.mark.parametrize("kind", ["500", "429", "timeout", "drop", "drop-mid", "lost-answer"])
def test_each_fault_once_at_every_step(hub: Hub, folder: Path, kind: Kind) -> None:
    """The first request to each route fails so; nothing is committed twice."""
    routes = ("whoami", "create", "tree", "preupload", "batch", "/2", "commit", "revision")
    hub.faults = Faults(first=dict.fromkeys(routes, kind))
    result = send(folder)
    assert_whole(hub, make_bundle(folder), result)
    assert hub.faults.met[kind] >= len(routes) - 1
    assert len(trees(hub)) == 3  # the Hub's own, the weights, what makes it loadable


def test_a_server_that_says_nothing_is_not_waited_for(hub: Hub, folder: Path) -> None:
    """The client's own timeout is none at all."""
    hub.silence_seconds = 40
    hub.faults = Faults(first=dict.fromkeys(("create", "tree", "/2"), "timeout"))
    started = time.monotonic()
    assert_whole(hub, make_bundle(folder), send(folder))
    assert time.monotonic() - started < 35 and hub.faults.met["timeout"] == 3


@pytest.mark.parametrize("after", [0, 3, 8, 20])
def test_a_token_that_expires(hub: Hub, folder: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.expires_after = after
    with pytest.raises(HubError, match=r"(401.*Invalid credentials|Invalid user token).*HF_TOKEN") as caught:
        send(folder)
    assert hub.token not in str(caught.value)
    bundle, received = make_bundle(folder), hub.store.received_bytes
    if REPO in hub.store.repos:
        assert_never_half_loadable(hub, bundle)
        assert "config.json" not in trees(hub)[-1]
    hub.expires_after, hub.token = None, "hf_new"
    monkeypatch.setenv("HF_TOKEN", "hf_new")
    assert_whole(hub, bundle, send(folder))
    weights = sum(len(data) for data in hub.store.contents.values())
    assert hub.store.received_bytes == weights, f"{received} bytes had arrived and were sent again"


def test_a_quota_that_is_reached(hub: Hub, folder: Path) -> None:
    bundle = make_bundle(folder)
    hub.store.quota_bytes = sum(file.size for file in bundle.early) // 2
    with pytest.raises(HubError, match=r"exceeded your storage quota.*the same command goes on"):
        send(folder)
    assert hub.store.contents and "config.json" not in trees(hub)[-1]
    hub.store.quota_bytes = None
    assert_whole(hub, bundle, send(folder))
    assert hub.store.received_bytes == sum(map(len, hub.store.contents.values()))


@pytest.mark.parametrize("path", ["model-00002-of-00004.safetensors", "tokenizer.json", INDEX_NAME, "config.json"])
def test_content_that_the_hub_keeps_wrong(hub: Hub, folder: Path, path: str) -> None:
    bundle = make_bundle(folder)
    hub.store.corrupt = (path,)
    with pytest.raises(HubError, match=rf"is not what was sent \(another size or hash: {path}\)"):
        send(folder)
    if path not in LOADABLE:
        assert all(name not in trees(hub)[-1] for name in LOADABLE), "loadable with damaged weights"
    hub.store.corrupt = ()
    assert_whole(hub, bundle, send(folder, target=Target(repo=REPO, replace=True)))


def put_other_model(hub: Hub, folder: Path) -> None:
    """A published model with one shard of the same name, more shards, and its own config and index."""
    hub.store.create(REPO, private=False)
    repo = hub.store.repos[REPO]
    names = ["config.json", INDEX_NAME, "model-00001-of-00004.safetensors", "model-00009-of-00009.safetensors"]
    old = {name: Stored(f"old {name}".encode(), None) for name in names}
    repo.add_commit("main", "old model", {**repo.commits[repo.branches["main"]], **old})


def test_another_model_is_not_overwritten(hub: Hub, folder: Path) -> None:
    put_other_model(hub, folder)
    with pytest.raises(HubError, match=r"holds another model: model-00009.*, config.json, .*--replace"):
        send(folder)
    assert len(trees(hub)) == 2 and not hub.store.contents


@pytest.mark.parametrize("name", ["kvq-reports/tasks.json", "serving/note.md"])
def test_reports_that_come_later_need_no_replace(hub: Hub, folder: Path, name: str) -> None:
    send(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("later")
    bundle = make_bundle(folder)
    result = send(folder)
    assert_whole(hub, bundle, result)
    assert result.sent_files == 1
    (folder / "tokenizer.json").write_text("another")
    with pytest.raises(HubError, match=r"holds another model: config.json, .*--replace"):
        send(folder)


def test_replacing_one_file_keeps_config_and_index(hub: Hub, folder: Path) -> None:
    """They are the same as before, but go with the first commit, so that old and new are never mixed."""
    send(folder)
    (folder / "tokenizer.json").write_text("another")
    bundle = make_bundle(folder)
    assert_whole(hub, bundle, send(folder, target=Target(repo=REPO, replace=True)))
    assert not any(name in trees(hub)[-2] for name in LOADABLE)


def test_replacing_never_shows_a_mixture(hub: Hub, folder: Path) -> None:
    put_other_model(hub, folder)
    bundle = make_bundle(folder)
    result = send(folder, target=Target(repo=REPO, replace=True))
    assert_whole(hub, bundle, result)
    old = trees(hub)[1]
    for tree in trees(hub)[2:]:
        assert not any(tree.get(name) == old[name] for name in (*LOADABLE, "model-00009-of-00009.safetensors"))
    assert_never_half_loadable(hub, bundle)


def test_private(hub: Hub, folder: Path) -> None:
    send(folder, target=Target(repo=REPO, private=True))
    assert hub.store.repos[REPO].private
    hub.store.create("owner/public", private=False)
    with pytest.raises(HubError, match=r"owner/public exists and is public. Nothing was sent"):
        send(folder, target=Target(repo="owner/public", private=True))
    assert len(hub.store.repos["owner/public"].history) == 1


def test_a_branch_of_its_own(hub: Hub, folder: Path) -> None:
    result = send(folder, target=Target(repo=REPO, revision="int4/g128"))
    repo = hub.store.repos[REPO]
    assert repo.branches["int4/g128"] == result.revision and "config.json" not in trees(hub)[-1]
    assert_never_half_loadable(hub, make_bundle(folder), "int4/g128")


def test_several_commits(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_FILES", 2)
    bundle = make_bundle(folder)
    assert_whole(hub, bundle, send(folder))
    assert_never_half_loadable(hub, bundle)
    assert len(trees(hub)) == 2 + -(-len(bundle.early) // 2)


def test_batches_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 100_000)
    files = make_bundle(folder).early
    groups = list(batches(files))
    assert [file for group in groups for file in group] == files and len(groups) > 1
    assert all(len(group) == 1 or sum(file.size for file in group) <= 100_000 for group in groups)


def test_a_stop_keeps_what_has_arrived(hub: Hub, folder: Path) -> None:
    class StopAtFirst(Notes):
        def sent(self, file: str, done_bytes: int, total_bytes: int) -> None:
            stop.signal = signal.SIGTERM

    stop, bundle = StopRequest(), make_bundle(folder)
    with pytest.raises(StoppedError, match="the same command goes on") as caught:
        upload(bundle, Target(repo=REPO, workers=1), StopAtFirst(), stop)
    assert caught.value.exit_code == 143 and 1 <= len(hub.store.contents) < len(bundle.early)
    before = hub.store.received_bytes
    assert_whole(hub, bundle, send(folder))
    assert hub.store.received_bytes == sum(map(len, hub.store.contents.values())) >= before


def test_a_file_that_changed_after_it_was_hashed(hub: Hub, folder: Path) -> None:
    bundle = make_bundle(folder)
    shard = folder / "model-00002-of-00004.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(HubError):
        upload(bundle, Target(repo=REPO), Notes())
    assert not any(name in trees(hub)[-1] for name in LOADABLE)


def test_hidden_files_stay_here_and_links_are_refused(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache" / "token").write_text("secret")
    assert not any("cache" in path for path in make_bundle(folder).files)
    (folder / "link.txt").symlink_to("/etc/hostname")
    with pytest.raises(OutputError, match=r"link\.txt is a symbolic link"):
        make_bundle(folder)


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        (CARD_TEXT, "---\nlicense: mit\n---\n\n{}\n\n# A model\n"),
        ("# A model\n", "{}\n\n# A model\n"),
        ("", "{}\n\n"),
        ("---\nnot closed\n", "{}\n\n---\nnot closed\n"),
    ],
)
def test_the_card_says_what_was_waved_through(text: str, marked: str) -> None:
    line = "> **Uploaded with `kvq upload --unverified`:** one thing; two lines."
    assert mark_card(text, ("one thing", "two\nlines")) == marked.format(line)


def test_a_marked_bundle_trusts_no_manifest(folder: Path) -> None:
    """What failed its checks is sent with the hashes that it has."""
    (folder / "config.json").write_text("{}")
    bundle = make_bundle(folder, ("a reason",))
    plain = make_bundle(folder)
    assert bundle.files["config.json"].sha256 != plain.files["config.json"].sha256
    card = bundle.files[CARD].content
    assert isinstance(card, bytes) and b"a reason" in card and (folder / CARD).read_text() == CARD_TEXT

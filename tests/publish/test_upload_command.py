"""`kvq upload` and `kvq download` as a person meets them: what is refused and said, and that the token never is."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvq.checkpoint.hub import be_patient, redact
from kvq.checkpoint.index import INDEX_NAME, MANIFEST_NAME
from kvq.publish.bundle import DISTANCE_FILE, LOADABLE
from kvq.publish.card_metadata import CARD
from tests.checkpoints import edit_tensor
from tests.conftest import Kvq
from tests.hub.faults import Faults
from tests.hub.folder import write_distance
from tests.hub.server import Hub, serve
from tests.hub.store import Tree
from tests.runs import SETTINGS, Shared, all_bytes, fresh_environment

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own, of httpx
REPO = "owner/model-int4"
CANARY = "hf_canaryCANARYcanary0123456789"


def newest(hub: Hub) -> Tree:
    repo = hub.store.repos[REPO]
    return repo.commits[repo.branches["main"]]


def test_it_prints_the_revision(hub: Hub, folder: Path, kvq_main: Kvq) -> None:
    said = kvq_main("upload", folder, REPO)
    assert said.code == 0 and said.out.strip() == hub.store.repos[REPO].branches["main"]
    for words in ("verifying", "logged in as somebody", "left", "comparing every file", "size and hash of each"):
        assert words in said.err, words
    again = kvq_main("upload", folder, REPO, "--json")
    report = json.loads(again.out)
    assert again.err == "" and report["revision"] == said.out.strip()
    assert (report["sent_files"], report["unverified"]) == (0, [])


def test_a_dry_run_says_what_would_be_sent_and_changes_nothing(hub: Hub, folder: Path, kvq_main: Kvq) -> None:
    said = kvq_main("upload", folder, REPO, "--dry-run")
    assert said.code == 0 and hub.store.repos == {} and hub.store.contents == {}
    assert set(said.out.splitlines()) == set(all_bytes(folder))
    assert "would make" in said.err and said.err.endswith("Nothing was sent.\n")
    assert kvq_main("upload", folder, REPO).code == 0
    commits, contents = dict(hub.store.repos[REPO].commits), dict(hub.store.contents)
    nothing = json.loads(kvq_main("upload", folder, REPO, "--dry-run", "--json").out)
    assert (nothing["send"], nothing["send_bytes"], nothing["make"], nothing["remove"]) == ([], 0, None, [])
    branch = json.loads(kvq_main("upload", folder, REPO, "--dry-run", "--json", "--revision", "other").out)
    assert (branch["send"], branch["make"]) == ([], "branch"), "a new branch starts as a copy of main"
    (folder / "serving" / "extra.txt").write_text("x")
    more = json.loads(kvq_main("upload", folder, REPO, "--dry-run", "--json").out)
    assert (more["send"], more["send_bytes"], more["remove"]) == (["serving/extra.txt"], 1, [])
    assert (hub.store.repos[REPO].commits, hub.store.contents) == (commits, contents)


def test_a_dry_run_refuses_what_the_upload_would(hub: Hub, folder: Path, kvq_main: Kvq) -> None:
    assert kvq_main("upload", folder, REPO).code == 0
    public = kvq_main("upload", folder, REPO, "--dry-run", "--private")
    assert public.code == 8 and "exists and is public" in public.err
    (folder / "extra.txt").write_text("x")
    assert kvq_main("upload", folder, REPO, "--replace").code == 0
    (folder / "extra.txt").unlink()
    before = newest(hub)
    strange = kvq_main("upload", folder, REPO, "--dry-run")
    assert strange.code == 8 and "holds another model: extra.txt" in strange.err and strange.out == ""
    replacing = json.loads(kvq_main("upload", folder, REPO, "--dry-run", "--replace", "--json").out)
    assert replacing["remove"] == ["extra.txt"] and newest(hub) == before
    (folder / CARD).unlink()
    assert kvq_main("upload", folder, REPO, "--dry-run").code == 5


def spoil(folder: Path, fault: str) -> str:
    """Damage a folder; gives what kvq then says."""
    if fault == "no report":
        (folder / DISTANCE_FILE).unlink()
        return "there is no kvq-reports/distance.json"
    if fault == "report of another kind":
        (folder / DISTANCE_FILE).write_text('{"schema": "kvq.kv/1"}')
        return "kvq-reports/distance.json: its schema is 'kvq.kv/1'"
    if fault == "report of other weights":
        (folder / DISTANCE_FILE).write_text('{"schema": "kvq.distance/1", "checkpoint_sha256": "0"}')
        return "kvq-reports/distance.json: it was measured on other weights"
    if fault == "report that is no JSON":
        (folder / DISTANCE_FILE).write_text("{")
        return "kvq-reports/distance.json: not valid JSON"
    if fault == "missed gate":
        gates = [{"name": "max_mean_kl", "passed": False}, {"name": "min_same_top", "passed": True}]
        write_distance(folder, gates=gates)
        return "kvq-reports/distance.json says that gates are missed: max_mean_kl"
    if fault == "no card":
        (folder / CARD).unlink()
        return "there is no README.md"
    if fault == "broken manifest":
        (folder / MANIFEST_NAME).write_text("{")
        return "kvq verify finds kvq-manifest.json: not valid JSON"
    if fault == "no manifest":
        (folder / MANIFEST_NAME).unlink()
        return "there is no kvq-manifest.json"
    edit_tensor(folder, "model.norm.weight", lambda value: value * 2)
    return "kvq verify finds "


FAULTS = (
    "no report",
    "report of another kind",
    "report of other weights",
    "report that is no JSON",
    "missed gate",
    "no card",
    "no manifest",
    "broken manifest",
    "changed weights",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_whole_is_not_sent(hub: Hub, folder: Path, kvq_main: Kvq, fault: str) -> None:
    reason = spoil(folder, fault)
    said = kvq_main("upload", folder, REPO)
    last = said.err.splitlines()[-1]
    assert said.code == 5 and said.out == "" and "Traceback" not in said.err
    assert last.startswith(f"kvq: {folder}: not sent: ") and reason in last and "--unverified" in last
    assert hub.asked == [], "something went to the Hub"


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_sent_all_the_same_says_so(hub: Hub, folder: Path, kvq_main: Kvq, fault: str) -> None:
    reason = spoil(folder, fault)
    local = all_bytes(folder)
    said = kvq_main("upload", folder, REPO, "--unverified", "--json")
    assert said.code == 0
    card, tree = newest(hub)[CARD].data.decode(), newest(hub)
    assert f"> **Uploaded with `kvq upload --unverified`:** {reason}" in card
    assert str(folder) not in card, "the card names a place on this machine"
    assert any(reason in told for told in json.loads(said.out)["unverified"])
    assert all_bytes(folder) == local
    assert {path: file.data for path, file in tree.items() if path not in (CARD, ".gitattributes")} == {
        path: data for path, data in local.items() if path != CARD
    }


def test_not_a_checkpoint_and_not_a_repository(hub: Hub, folder: Path, kvq_main: Kvq, tmp_path: Path) -> None:
    assert kvq_main("upload", tmp_path / "nothing", REPO, "--unverified").code == 3
    said = kvq_main("upload", folder, "no-owner")
    assert said.code == 2 and "no-owner: not a Hub repository" in said.err and hub.asked == []


def test_no_login(hub: Hub, folder: Path, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    said = kvq_main("upload", folder, REPO)
    assert said.code == 8 and hub.asked == []
    assert "there is no Hub token here" in said.err and "hf auth login" in said.err


def start_apart(hub: Hub, folder: Path, home: Path, **more: str) -> subprocess.Popen[str]:
    """`kvq upload` in a process of its own, with the client as it is installed, its waits and its log included."""
    environment = fresh_environment() | {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": hub.token, "NO_PROXY": "*",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    } | more  # fmt: skip
    command = [sys.executable, "-m", "kvq", "upload", str(folder), REPO]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_token_is_in_no_output(folder: Path, tmp_path: Path) -> None:
    """With every log of the client on, under faults, and from a server that at last repeats it in a refusal."""
    faults = Faults(first={"tree": "500", "batch": "drop"})
    with serve(Hub(token=CANARY, faults=faults, expires_after=24, echoes_token=True)) as hub:
        with start_apart(hub, folder, tmp_path, HF_DEBUG="1", HF_HUB_VERBOSITY="debug") as process:
            out, err = process.communicate(timeout=300)
        assert process.returncode == 8 and CANARY in hub.tokens and faults.met.total() == 2
    assert "curl" in err, "the client's log is not on"
    assert err.splitlines()[-1].startswith("kvq: ") and "Invalid credentials" in err.splitlines()[-1]
    assert CANARY not in out + err
    stored = [file.data for tree in hub.store.repos[REPO].commits.values() for file in tree.values()]
    assert not any(CANARY.encode() in data for data in [*stored, *all_bytes(folder).values()])


@pytest.mark.parametrize("echoes", [True, False])
@pytest.mark.parametrize("token", [CANARY, CANARY + "\x01", CANARY + "\u00e9", CANARY + " x", CANARY + "\u2028"])
def test_a_refused_or_impossible_token_is_not_repeated(
    hub: Hub, folder: Path, kvq_main: Kvq, monkeypatch: pytest.MonkeyPatch, token: str, echoes: bool
) -> None:
    hub.echoes_token = echoes
    monkeypatch.setenv("HF_TOKEN", token)
    said = kvq_main("upload", folder, REPO)
    assert said.code == 8 and CANARY not in said.err + said.out and "Traceback" not in said.err


def test_redaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a\x01b")
    assert redact("x hf_a\x01b y") == "x <token> y"
    assert redact(repr(b"Bearer hf_a\x01b")) == "b'Bearer <token>'"
    assert (
        redact("503 for url 'https://s3.x/a/b?X-Amz-Signature=123&b=1': no") == "503 for url 'https://s3.x/a/b?...': no"
    )
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    assert redact("x") == "x"


def test_the_clients_log_is_redacted(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client logs, such as a server's warning that repeats a header."""
    monkeypatch.setenv("HF_TOKEN", CANARY)
    shown = io.StringIO()
    logger = logging.getLogger("huggingface_hub")
    handler = logging.StreamHandler(shown)
    logger.addHandler(handler)
    try:
        be_patient()
        logging.getLogger("huggingface_hub.utils._http").error("the server says %s", f"Bearer {CANARY}")
    finally:
        logger.removeHandler(handler)
    assert shown.getvalue() == "the server says Bearer <token>\n"


def test_killed_and_started_again(hub: Hub, folder: Path, kvq_main: Kvq, tmp_path: Path) -> None:
    """kill -9 while content is being sent: nothing there can be loaded, and the next run sends only the rest."""
    hub.faults, hub.silence_seconds = Faults(first={"/content/": "timeout"}), 3
    with start_apart(hub, folder, tmp_path) as process:
        assert process.stderr is not None
        while " sent: " not in process.stderr.readline():
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    arrived = set(hub.store.contents)
    assert arrived and all(name not in newest(hub) for name in LOADABLE)
    assert kvq_main("upload", folder, REPO).code == 0
    assert INDEX_NAME in newest(hub) and arrived < set(hub.store.contents)
    assert hub.store.received_bytes == sum(map(len, hub.store.contents.values()))


def test_two_signals(folder: Path, tmp_path: Path) -> None:
    """The first waits for the files on their way, which a silent server never takes; the second ends at once."""
    with serve(Hub(faults=Faults(first={"/content/": "timeout"}), silence_seconds=40)) as hub:
        with start_apart(hub, folder, tmp_path) as process:
            assert process.stderr is not None
            while " sent: " not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            while "a second signal stops at once" not in process.stderr.readline():
                assert process.poll() is None
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            started = time.monotonic()
            said = process.stderr.read()
            process.wait(timeout=30)
        assert process.returncode == 130 and time.monotonic() - started < 10
        assert said.endswith("kvq: interrupted. What has arrived is kept; the same command goes on.\n"), said
        assert all(name not in newest(hub) for name in LOADABLE)


def test_quantize_and_verify_a_model_of_the_hub(
    hub: Hub, shared: Shared, kvq_main: Kvq, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source comes from the Hub under faults; the output is that of the same local folder."""
    source = shared.source("kimi-k2")
    hub.store.create("owner/source", private=False)
    hub.put_folder("owner/source", source)
    hub.faults = Faults(rate=0.3, seed=11)
    said = kvq_main("download", "owner/source", "--json")
    assert said.code == 0, said.err
    folder = Path(json.loads(said.out)["folder"])
    assert all_bytes(source).items() <= all_bytes(folder).items()
    out = tmp_path / "out"
    said = kvq_main(
        "quantize",
        "owner/source",
        *(f"--set={setting}" for setting in SETTINGS),
        "--calibration",
        shared.calibration,
        "--out",
        out,
        "--json",
    )
    assert said.code == 0, said.err
    report = json.loads(said.out)
    assert report["source"]["id"] == "owner/source"
    assert report["source"]["revision"] == hub.store.repos["owner/source"].branches["main"]
    shards = {name: data for name, data in all_bytes(out).items() if name.endswith(".safetensors")}
    assert shards.items() <= all_bytes(shared.output("kimi-k2")).items()

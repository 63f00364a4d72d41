"""MODEL -> folder. The Hub is replaced here; no test touches the network."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionResolutionError,
    XetDownloadError,
)

from kvq.checkpoint.hub import ATTEMPTS
from kvq.checkpoint.source import Source, resolve_source
from kvq.errors import CheckpointError, HubError, OutputError
from kvq.recipes.models import known_models

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://example.invalid"))


class FakeHub:
    """Notes what is asked; gives one commit and one folder, or raises what it was given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, str, str | None]] = []
        self.info_error: Exception | None = None
        self.download_error: Exception | None = None
        self.commit: object = COMMIT

    def model_info(
        self, repo: str, revision: str | None = None, timeout: float | None = None, files_metadata: bool = False
    ) -> SimpleNamespace:
        assert timeout is not None and files_metadata
        self.calls.append(("info", repo, revision))
        if self.info_error is not None:
            raise self.info_error
        return SimpleNamespace(sha=self.commit, siblings=None)

    def snapshot_download(self, repo: str, revision: str | None = None) -> str:
        self.calls.append(("download", repo, revision))
        if self.download_error is not None:
            raise self.download_error
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "snapshot")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: fake)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fake.snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("kvq.checkpoint.hub.time", SimpleNamespace(sleep=lambda seconds: None))
    return fake


def test_folder_is_taken_as_it_is(tmp_path: Path, hub: FakeHub) -> None:
    assert resolve_source(str(tmp_path)) == Source(tmp_path, str(tmp_path), None)
    assert hub.calls == []


def test_folder_of_the_form_owner_name_wins(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_source("owner/name") == Source(Path("owner/name"), "owner/name", None)
    assert hub.calls == []


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_source("~/model").folder == tmp_path / "model"


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_hub_id_is_resolved_to_a_commit_before_the_download(hub: FakeHub, revision: str | None) -> None:
    assert resolve_source("owner/name", revision) == Source(hub.folder, "owner/name", COMMIT)
    assert hub.calls == [("info", "owner/name", revision), ("download", "owner/name", COMMIT)]


@pytest.mark.parametrize("alias", known_models())
def test_every_alias_leads_to_its_hub_id(hub: FakeHub, alias: str) -> None:
    model = known_models()[alias]
    assert resolve_source(model.hub).id == model.hub
    assert [call[:2] for call in hub.calls] == [("info", model.hub), ("download", model.hub)]


@pytest.mark.parametrize("model", ["glm-9", "a/b/c", "./a/b", "./a", "/no-such-folder", "~/nothing", "../nothing"])
def test_unknown_name_never_reaches_the_hub(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"no such folder, no known alias .* and not a Hub id"):
        resolve_source(model)
    assert hub.calls == []


ERRORS: dict[str, Callable[[], Exception]] = {
    "not found": lambda: RepositoryNotFoundError("404 Client Error.\nlong story", response=RESPONSE),
    "refused": lambda: HfHubHTTPError("403 Forbidden", response=RESPONSE),
    "offline": lambda: OfflineModeIsEnabled("offline mode is enabled"),
    "not cached": lambda: LocalEntryNotFoundError("not in the cache"),
    "unreachable": lambda: httpx.ConnectError("no route to host"),
    "time out": lambda: httpx.ReadTimeout("timed out"),
    "disk full": lambda: OSError(28, "No space left on device"),
    "no words": lambda: httpx.ConnectError(""),
    "revision": lambda: RevisionResolutionError("Cannot resolve revision 'main'"),
    "xet": lambda: XetDownloadError("Xet storage gave nothing"),
    "xet's own": lambda: RuntimeError("CAS service error"),
    "xet login": lambda: PermissionError("token refresh failed"),
    "no login": lambda: LocalTokenNotFoundError("Token is required"),
    "no JSON": lambda: ValueError("Expecting value: line 1 column 1 (char 0)"),
    "an answer without its parts": lambda: KeyError("sha"),
}


@pytest.mark.parametrize("step", ["info_error", "download_error"])
@pytest.mark.parametrize("case", ERRORS)
def test_hub_that_does_not_deliver(hub: FakeHub, case: str, step: str) -> None:
    error: Any = ERRORS[case]()
    setattr(hub, step, error)
    with pytest.raises(HubError) as caught:
        resolve_source("owner/name")
    message, first = str(caught.value), (str(error).splitlines() or [type(error).__name__])[0]
    assert message.startswith(f"owner/name: the Hub did not deliver ({first})") and "\n" not in message


def test_id_that_the_hub_calls_invalid(hub: FakeHub) -> None:
    hub.info_error = HFValidationError("Repo id must be ...")
    with pytest.raises(CheckpointError, match="owner/na me: not a valid Hub id"):
        resolve_source("owner/na me")


@pytest.mark.parametrize("commit", [None, "", "main", 7])
def test_a_hub_that_names_no_commit(hub: FakeHub, commit: object) -> None:
    hub.commit = commit
    with pytest.raises(HubError, match=r"owner/name: the Hub gave .* as the commit of main"):
        resolve_source("owner/name")


def test_a_local_disk_that_is_full_is_not_the_hubs_fault(hub: FakeHub) -> None:
    hub.download_error = OSError(28, "No space left on device", "/cache/blob")
    with pytest.raises(OutputError, match="the local disk failed"):
        resolve_source("owner/name")


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (httpx.ReadTimeout("timed out"), ATTEMPTS),
        (HfHubHTTPError("503", response=httpx.Response(503, request=RESPONSE.request)), ATTEMPTS),
        (HfHubHTTPError("403", response=httpx.Response(403, request=RESPONSE.request)), 1),
        (OfflineModeIsEnabled("offline"), 1),
        (ValueError("no JSON"), 1),
    ],
)
def test_what_may_pass_is_tried_again(hub: FakeHub, error: Exception, calls: int) -> None:
    hub.info_error = error
    told: list[str] = []
    with pytest.raises(HubError):
        resolve_source("owner/name", note=told.append)
    assert len(hub.calls) == calls
    assert len(told) == calls - 1 and all(line.startswith("attempt ") for line in told), "it waits without a word"

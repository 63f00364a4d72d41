"""MODEL on the command line -> a local folder, with where it came from. The Hub's only way in."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.errors import CheckpointError, HubError

COMMIT_LENGTH = 40


@dataclass(frozen=True, slots=True)
class Source:
    """`revision` is the Hub commit that was downloaded, None for a local folder."""

    folder: Path
    id: str
    revision: str | None = None

    @property
    def name(self) -> str:
        """The repository's or the folder's own name, without its owner or place."""
        return self.id.rsplit("/", 1)[-1] if self.revision else Path(os.path.abspath(self.folder)).name


def resolve_source(model: str, revision: str | None = None) -> Source:
    """A folder if one of that name exists, else a Hub id `owner/name`, downloaded into the Hub cache (resumable).

    The revision is resolved to a commit first, so that all files come from one state of the repository.
    Raises CheckpointError if it is neither, HubError if the Hub does not deliver.
    """
    folder = local_folder(model)
    if folder is not None:
        if revision is not None:
            raise CheckpointError(
                f"{model} is a folder, and --revision {revision} names a state of a Hub repository. Leave it out, or "
                "give the Hub id."
            )
        return Source(folder, model)
    check_hub_id(model)
    return _download(model, revision)


def local_folder(model: str) -> Path | None:
    """The folder that MODEL names, `~` resolved; None where there is none of that name."""
    if not model:
        raise CheckpointError("MODEL is empty. Give a folder (`.` for this one), a Hub id or an alias.")
    folder = Path(os.path.expanduser(model))
    return folder if folder.is_dir() else None


def check_hub_id(model: str) -> None:
    """Raise CheckpointError for what is neither a folder, nor an alias, nor of the form `owner/name`."""
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise CheckpointError(
            f"{model}: no such folder, no known alias (`kvq models` lists them) and not a Hub id of the form "
            f"owner/name."
        )


def hub_info(repo: str, revision: str | None) -> Any:
    """huggingface_hub's ModelInfo, its `sha` the commit that a revision names now. To be called in `hub_errors`."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision)
    assert info.sha is not None and len(info.sha) == COMMIT_LENGTH, f"the Hub gave commit {info.sha!r}"
    return info


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into kvq's errors."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as error:
        raise CheckpointError(f"{repo}: not a valid Hub id ({error}).") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.HTTPError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HubError(
            f"{repo}: the Hub did not deliver ({first_line}). What has arrived is kept; run the same command again, or "
            "download the folder by other means and give its path."
        ) from None


def _download(repo: str, revision: str | None) -> Source:
    from huggingface_hub import snapshot_download

    with hub_errors(repo):
        commit = hub_info(repo, revision).sha
        return Source(Path(snapshot_download(repo, revision=commit)), repo, commit)

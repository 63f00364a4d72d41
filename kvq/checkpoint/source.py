"""MODEL on the command line -> a local folder, with where it came from. The Hub's only way in."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.checkpoint.arrival import check_arrival
from kvq.checkpoint.hub import Note, hub_errors, hub_info, retried
from kvq.errors import CheckpointError

DOWNLOAD_ATTEMPTS = 30  # a failure of any one file ends an attempt; those that arrived are not asked for again


def quiet(text: str) -> None:
    """Takes notes and shows none."""


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


def resolve_source(
    model: str, revision: str | None = None, note: Note = quiet, progress: Callable[[int, int], None] | None = None
) -> Source:
    """A folder if one of that name exists, else a Hub id `owner/name`, downloaded into the Hub cache (resumable).

    The revision is resolved to a commit first, so that all files come from one state of the repository; what has
    arrived is compared with the hashes that the Hub states.
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
    return download(model, revision, None, note, progress)


def local_folder(model: str) -> Path | None:
    """The folder that MODEL names, `~` resolved; None where there is none of that name."""
    if not model:
        raise CheckpointError("MODEL is empty. Give a folder (`.` for this one), a Hub id or an alias.")
    folder = Path(os.path.expanduser(model))
    return folder if folder.is_dir() else None


def is_hub_id(text: str) -> bool:
    """Whether a text has the form `owner/name`."""
    return text.count("/") == 1 and not text.startswith((".", "/", "~"))


def check_hub_id(model: str) -> None:
    """Raise CheckpointError for what is neither a folder, nor an alias, nor of the form `owner/name`."""
    if not is_hub_id(model):
        raise CheckpointError(
            f"{model}: no such folder, no known alias (`kvq models` lists them) and not a Hub id of the form "
            "owner/name."
        )


def download(
    repo: str, revision: str | None, folder: Path | None, note: Note, progress: Callable[[int, int], None] | None = None
) -> Source:
    """A Hub repository in the Hub cache, or in `folder`; every file has the size and hash that the Hub states.

    Raises CheckpointError for an invalid id, HubError if the Hub does not deliver or a file arrived damaged.
    """
    from huggingface_hub import snapshot_download

    where: dict[str, Any] = {} if folder is None else {"local_dir": folder}
    with hub_errors(repo):
        info = hub_info(repo, revision, note, files=True)
        arrived = Path(retried(lambda: snapshot_download(repo, revision=info.sha, **where), note, DOWNLOAD_ATTEMPTS))
    check_arrival(repo, info.sha, arrived, info.siblings or (), progress)
    return Source(arrived, repo, info.sha)

"""One branch of one Hub repository, as `kvq upload` needs it: list, store, commit. The door for writing to the Hub.

Every call is safe to repeat: content is stored by its hash, and a commit is made of what the branch still lacks, so an
answer that got lost leads to no second commit.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvq.checkpoint.hub import Note, hub_errors, hub_info, retried
from kvq.errors import HubError
from kvq.publish.bundle import LocalFile

T = TypeVar("T")
MAIN = "main"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the Hub lists it: `sha256` where it is stored as a large file, else git's blob hash alone."""

    size: int
    git_sha1: str
    sha256: str | None

    def holds(self, file: LocalFile) -> bool:
        """Whether this is that file: by size and hash, never by name."""
        if self.size != file.size:
            return False
        return self.sha256 == file.sha256 if self.sha256 is not None else self.git_sha1 == file.git_sha1()


@dataclass(slots=True)
class HubRepo:
    """Every method raises HubError, with `advice`, when the Hub does not do its part after several tries.

    `store` may be called by several threads, for different files.
    """

    repo: str
    branch: str
    note: Note
    advice: str
    _stored: dict[str, Any] = field(default_factory=dict)

    def _ask(self, call: Callable[[], T]) -> T:
        with hub_errors(self.repo, self.advice):
            return retried(call, self.note)

    def _info(self, revision: str | None) -> Any:
        with hub_errors(self.repo, self.advice):
            return hub_info(self.repo, revision, self.note)

    def login(self) -> str:
        """Who the token belongs to."""
        return str(self._ask(lambda: _api().whoami()["name"]))

    def create(self, private: bool) -> None:
        """Make repository and branch where they are missing. Raises HubError for a public one that is to be private."""
        api = _api()
        self._ask(lambda: api.create_repo(self.repo, private=private or None, exist_ok=True))
        self._refuse_public(private)
        if self.branch != MAIN:
            self._ask(lambda: api.create_branch(self.repo, branch=self.branch, exist_ok=True))

    def before_create(self, private: bool) -> tuple[str | None, dict[str, RemoteFile]]:
        """What `create` would have to make (repository, branch or None), and the files that the branch would then have.

        Asks, and changes nothing. Raises what `create` raises.
        """
        api = _api()
        if not self._ask(lambda: api.repo_exists(self.repo)):
            return "repository", {}
        self._refuse_public(private)
        if self.branch == MAIN or self._ask(lambda: api.revision_exists(self.repo, self.branch)):
            return None, self.files()
        return "branch", self.files(MAIN)

    def _refuse_public(self, private: bool) -> None:
        if private and not self._info(None).private:
            raise HubError(
                f"{self.repo} exists and is public. Nothing was sent; make it private first, or drop --private."
            )

    def head(self) -> str:
        """The commit that the branch names now."""
        return str(self._info(self.branch).sha)

    def files(self, revision: str | None = None) -> dict[str, RemoteFile]:
        """All files of the branch, or of a commit."""
        return self._ask(lambda: self._list(revision or self.branch))

    def _list(self, revision: str) -> dict[str, RemoteFile]:
        found = {}
        for item in _api().list_repo_tree(self.repo, recursive=True, revision=revision):
            blob = getattr(item, "blob_id", None)
            if blob is not None:  # a folder has none
                lfs = getattr(item, "lfs", None)
                found[item.path] = RemoteFile(item.size, blob, None if lfs is None else lfs.sha256)
        return found

    def store(self, file: LocalFile) -> None:
        """Send a large file's content; nothing is visible in the repository yet. Content that is there is not sent."""
        self._ask(lambda: self._preupload(file))

    def _preupload(self, file: LocalFile) -> None:
        addition = _addition(file)
        _api().preupload_lfs_files(self.repo, additions=[addition], revision=self.branch, num_threads=1)
        self._stored[file.path] = addition

    def commit(self, files: Sequence[LocalFile], deleted: Iterable[str], message: str) -> None:
        """One commit of those files that the branch does not hold yet, and of those deletions that are not done."""
        gone = frozenset(deleted)
        self._ask(lambda: self._commit(files, gone, message))

    def _commit(self, files: Sequence[LocalFile], deleted: frozenset[str], message: str) -> None:
        from huggingface_hub import CommitOperationDelete

        there = self._list(self.branch)
        operations: list[Any] = [self._stored.get(file.path) or _addition(file) for file in lacking(files, there)]
        operations += [CommitOperationDelete(path) for path in sorted(deleted & there.keys())]
        if operations:
            _api().create_commit(self.repo, operations, commit_message=message, revision=self.branch)


def lacking(files: Iterable[LocalFile], there: dict[str, RemoteFile]) -> list[LocalFile]:
    """The files that a listing does not hold with this size and hash."""
    return [file for file in files if file.path not in there or not there[file.path].holds(file)]


def quiet_client() -> None:
    """No bars beside kvq's own lines, and no warnings: those hold signed links, which a log should not keep.

    HF_HUB_VERBOSITY brings the warnings back.
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


def _addition(file: LocalFile) -> Any:
    """The operation, with the hash that is known already: 400 GB are not read once more for it."""
    from huggingface_hub import CommitOperationAdd

    operation = CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=file.content)
    operation.upload_info.sha256 = bytes.fromhex(file.sha256)
    return operation

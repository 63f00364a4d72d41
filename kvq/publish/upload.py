"""A whole folder to the Hub: weights first, what makes it loadable last, then a comparison of every file.

The Hub itself is the memory of an upload: what it holds already, by hash, is not sent again, from whatever machine.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Protocol

from kvq.checkpoint.index import REPORTS
from kvq.errors import HubError, StoppedError
from kvq.publish.bundle import LOADABLE, Bundle, LocalFile
from kvq.publish.hub_repo import MAIN, HubRepo, RemoteFile, lacking, quiet_client
from kvq.publish.serving_files import SERVING_FOLDER
from kvq.stop import StopRequest

BATCH_BYTES = 50 * 10**9  # content that no commit names is dropped by the Hub after a day or so
BATCH_FILES = 50
PUT_BY_THE_HUB = (".gitattributes",)
BESIDE = (f"{REPORTS}/", f"{SERVING_FOLDER}/")
SHOWN = 5
ADVICE = (
    "What has arrived is kept and nothing there can be loaded yet; the same command goes on. "
    "The token comes from HF_TOKEN or `hf auth login` and needs the right to write."
)


class UploadProgress(Protocol):
    """What an upload tells while it goes on."""

    def note(self, text: str) -> None: ...

    def sent(self, file: str, done_bytes: int, total_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to, and what may happen there. `replace` allows to delete and overwrite what a model there consists of."""

    repo: str
    revision: str = MAIN
    private: bool = False
    replace: bool = False
    workers: int = 4


@dataclass(frozen=True, slots=True)
class Planned:
    """What an upload would do: what it would make first (repository, branch or None), send and remove."""

    repo: str
    make: str | None
    num_files: int
    num_bytes: int
    send: tuple[str, ...]
    send_bytes: int
    remove: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The commit that holds the whole folder; `sent` counts what this run had to send."""

    repo: str
    revision: str
    num_files: int
    num_bytes: int
    sent_files: int
    sent_bytes: int


def plan_upload(bundle: Bundle, target: Target, progress: UploadProgress) -> Planned:
    """What `upload` would do now; nothing is made, sent or removed. Raises HubError where `upload` would."""
    quiet_client()
    remote = HubRepo(target.repo, target.revision, progress.note, ADVICE)
    progress.note(f"logged in as {remote.login()}")
    make, there = remote.before_create(target.private)
    removed = _to_remove(bundle, target, there)
    missing = lacking([*bundle.early, *bundle.last], _without(there, removed))
    return Planned(
        target.repo, make, len(bundle.files), sum(file.size for file in bundle.files.values()),
        tuple(file.path for file in missing), sum(file.size for file in missing), tuple(removed),
    )  # fmt: skip


def upload(bundle: Bundle, target: Target, progress: UploadProgress, stop: StopRequest | None = None) -> Uploaded:
    """Send what the branch lacks, then compare. Raises HubError; the same call then goes on.

    While weights are missing the branch has neither config nor index, so no engine loads a part of it.
    """
    quiet_client()
    remote = HubRepo(target.repo, target.revision, progress.note, ADVICE)
    progress.note(f"logged in as {remote.login()}")
    remote.create(target.private)
    there = remote.files()
    removed = _to_remove(bundle, target, there)
    left = _without(there, removed)
    early, last = lacking(bundle.early, left), lacking(bundle.last, left)
    sending = _Sending(remote, target.workers, progress, stop, sum(file.size for file in (*early, *last)))
    _send_early(sending, early, removed)
    unseen = lacking(bundle.early, remote.files())
    if unseen:
        raise _differs(target.repo, remote.head(), f"another size or hash: {_some([file.path for file in unseen])}")
    sending.store(last)
    remote.commit(last, (), "Add config, index, manifest and card: the checkpoint is whole")
    progress.note("comparing every file")
    revision = remote.head()
    compare(bundle, remote.files(revision), target.repo, revision)
    size = sum(file.size for file in bundle.files.values())
    return Uploaded(target.repo, revision, len(bundle.files), size, len(early) + len(last), sending.total)


def _send_early(sending: "_Sending", files: Sequence[LocalFile], removed: Sequence[str]) -> None:
    """All that is not loadable by itself. The first commit also deletes, so that old and new never make a mixture."""
    for number, batch in enumerate(batches(files)):
        sending.store(batch)
        deleted = removed if number == 0 else ()
        sending.remote.commit(batch, deleted, f"Add {len(batch)} files of a checkpoint, without its config")
    if removed and not files:
        sending.remote.commit((), removed, "Remove files that the new checkpoint does not have")


@dataclass(slots=True)
class _Sending:
    """Several files at a time, and how far it has come."""

    remote: HubRepo
    workers: int
    progress: UploadProgress
    stop: StopRequest | None
    total: int
    done: int = 0

    def store(self, files: Sequence[LocalFile]) -> None:
        """Raises what the first failure raises, or StoppedError, when the files on their way are finished."""
        pool = ThreadPoolExecutor(self.workers)
        jobs = {pool.submit(self.remote.store, file): file for file in files}
        at_once = False
        try:
            for job in as_completed(jobs):
                job.result()
                self.done += jobs[job].size
                self.progress.sent(jobs[job].path, self.done, self.total)
                self._stop_if_asked()
        except KeyboardInterrupt:  # the second signal
            at_once = True
            raise
        finally:
            pool.shutdown(wait=not at_once, cancel_futures=True)

    def _stop_if_asked(self) -> None:
        if self.stop is not None and self.stop.signal is not None:
            raise StoppedError("Stopped. What has arrived is kept; the same command goes on.", self.stop.signal)


def batches(files: Sequence[LocalFile]) -> Iterator[list[LocalFile]]:
    """Files by the commit they are part of, in order."""
    batch: list[LocalFile] = []
    for file in files:
        if batch and (len(batch) == BATCH_FILES or sum(item.size for item in batch) + file.size > BATCH_BYTES):
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch


def _to_remove(bundle: Bundle, target: Target, there: dict[str, RemoteFile]) -> list[str]:
    """What the first commit deletes: files of another checkpoint, and what would make a mixture of two loadable.

    Raises HubError if there is any and `replace` does not allow it.
    """
    strange = sorted(there.keys() - bundle.files.keys() - set(PUT_BY_THE_HUB))
    # Reports and serving settings may come later, beside a model that stays loadable: no engine reads them with it.
    changes = any(not file.path.startswith(BESIDE) for file in lacking(bundle.early, there))
    mixed = [name for name in LOADABLE if name in there and changes]
    removed = [*strange, *(name for name in mixed if name not in strange)]
    if removed and not target.replace:
        raise HubError(
            f"{target.repo} ({target.revision}) holds another model: {_some(removed)}. Nothing was sent. Choose a new "
            "repository or --revision, or add --replace to delete these files and overwrite the rest."
        )
    return removed


def _without(there: dict[str, RemoteFile], removed: Sequence[str]) -> dict[str, RemoteFile]:
    """What is there once these are deleted. A config that does not change goes with the old weights and comes again."""
    return {path: file for path, file in there.items() if path not in removed}


def compare(bundle: Bundle, there: dict[str, RemoteFile], repo: str, revision: str) -> None:
    """Every file of the bundle is there with its size and hash, and nothing else is. Raises HubError with names."""
    missing = sorted(bundle.files.keys() - there.keys())
    strange = sorted(there.keys() - bundle.files.keys() - set(PUT_BY_THE_HUB))
    wrong = [file.path for file in lacking(bundle.files.values(), there) if file.path in there]
    problems = [
        f"{title}: {_some(names)}"
        for title, names in (("missing", missing), ("another size or hash", wrong), ("not from here", strange))
        if names
    ]
    if problems:
        raise _differs(repo, revision, "; ".join(problems))


def _differs(repo: str, revision: str, found: str) -> HubError:
    return HubError(
        f"{repo}: what the Hub lists at {revision} is not what was sent ({found}). Do not announce it; run the same "
        "command again, which sends those files anew."
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

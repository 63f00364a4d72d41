"""What came from the Hub against what the Hub says of it: size, and sha256 or git blob hash, of every file.

Hashing 700 GB takes a while, so what was found right is remembered beside the Hub cache, by size and time of change.
"""

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.checkpoint.hashing import git_blob_sha1, read_chunks, sha256_file
from kvq.errors import CheckpointError, HubError

HASHING_THREADS = 4


@dataclass(frozen=True, slots=True)
class Expected:
    """One file as the Hub lists it: `digest` is a sha256 where `is_lfs`, else git's blob hash (sha1)."""

    path: str
    size: int
    digest: str
    is_lfs: bool


def digest_of(path: Path, is_lfs: bool) -> str:
    """The digest by which the Hub knows this content."""
    return sha256_file(path) if is_lfs else git_blob_sha1(read_chunks(path), path.stat().st_size)


def expected_files(repo: str, siblings: Iterable[Any]) -> list[Expected]:
    """What the Hub's listing says. Raises HubError where it gives no size or hash, or a name that leads elsewhere."""
    found = []
    for item in siblings:
        name, size = item.rfilename, item.size
        lfs = getattr(item, "lfs", None)
        digest = lfs.sha256 if lfs is not None else item.blob_id
        if not isinstance(size, int) or not isinstance(digest, str):
            raise HubError(f"{repo}: the Hub states no size or hash of {name}. Try again later.")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise HubError(f"{repo}: the Hub lists a file {name!r}, which leads out of the folder. Do not use it.")
        found.append(Expected(name, size, digest, lfs is not None))
    return found


def check_arrival(
    repo: str, commit: str, folder: Path, siblings: Iterable[Any], progress: Callable[[int, int], None] | None = None
) -> None:
    """Compare every listed file below `folder`. Raises HubError naming the first that is missing or different."""
    files = expected_files(repo, siblings)
    memory = _Memory(repo, commit)
    total, done = sum(file.size for file in files), 0

    def check(file: Expected) -> int:
        path = folder / file.path
        if not path.is_file():
            raise HubError(f"{repo}: {file.path} has not arrived in {folder}. Run the same command again.")
        if path.stat().st_size != file.size:
            _refuse(repo, path, f"{path.stat().st_size} bytes, the Hub says {file.size}")
        if not memory.knows(path, file.digest):
            if digest_of(path, file.is_lfs) != file.digest:
                _refuse(repo, path, f"the Hub says {'sha256' if file.is_lfs else 'git hash'} {file.digest}")
            memory.note(path, file.digest)
        return file.size

    try:
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            for size in pool.map(check, files):
                done += size
                if progress is not None:
                    progress(done, total)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror}).") from None
    finally:
        memory.save()


def _refuse(repo: str, path: Path, found: str) -> None:
    raise HubError(
        f"{repo}: {path} arrived damaged ({found}). Remove {os.path.realpath(path)} and run the same command again."
    )


class _Memory:
    """Files that were hashed and right, of one commit. Losing it costs time, never correctness."""

    def __init__(self, repo: str, commit: str) -> None:
        from huggingface_hub import constants

        self.path = Path(constants.HF_HOME) / "kvq-checked" / f"{repo.replace('/', '--')}--{commit}.json"
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            rows = {}
        self.rows: dict[str, list[object]] = rows if isinstance(rows, dict) else {}

    @staticmethod
    def _state(path: Path, digest: str) -> list[object]:
        status = path.stat()
        return [status.st_size, status.st_mtime_ns, status.st_ino, digest]

    def knows(self, path: Path, digest: str) -> bool:
        return self.rows.get(os.path.realpath(path)) == self._state(path, digest)

    def note(self, path: Path, digest: str) -> None:
        self.rows[os.path.realpath(path)] = self._state(path, digest)

    def save(self) -> None:
        draft = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(self.rows), encoding="utf-8")
            draft.replace(self.path)
        except OSError:  # a cache that cannot be written is only hashed again
            return

"""Is the source still what it was: while a run reads it, and when a later run goes on?

A run of hours reads each shard once; what it has written of one version does not fit another.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvq.checkpoint.index import CheckpointIndex
from kvq.errors import CheckpointError

SAMPLES = 16
SAMPLE_BYTES = 65536


class SourceWatch:
    """Remembers size, time of change and inode of files; `check` raises CheckpointError when one is another now."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder = folder
        self._seen = {name: _identity(folder / name) for name in names}

    def check(self, names: Iterable[str] | None = None) -> None:
        """All files, or those named."""
        for name in self._seen if names is None else names:
            found = _identity(self._folder / name)
            if found != self._seen[name]:
                what = "is gone" if found is None else "has changed"
                raise CheckpointError(
                    f"{self._folder / name} {what} since the run began; what was read of it may be half old, half new. "
                    "Let nothing write there, and run the same command again."
                )


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def source_digest(folder: Path, config: Mapping[str, Any], index: CheckpointIndex) -> str:
    """A hash over config, tensor table and `content_digest`: of what a result depends on in a source of 700 GB."""
    layout = {name: [info.shard, info.dtype, info.shape, info.offset] for name, info in sorted(index.tensors.items())}
    described = json.dumps([content_digest(folder, index.shards), layout, config], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def content_digest(folder: Path, names: Iterable[str]) -> str:
    """A hash over sizes and 16 samples of 64 KiB spread over each file, its first and last bytes among them.

    Other weights of the same layout differ in it; it takes milliseconds for what a whole hash reads for an hour, and
    may miss a change of few bytes. Times of change do not count: a source may be copied to a new disk between two runs.
    """
    digest = hashlib.sha256()
    for name in names:
        path = folder / name
        try:
            size = path.stat().st_size
            digest.update(f"{name}\0{size}\0".encode())
            with path.open("rb") as file:
                for number in range(SAMPLES):
                    file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Download this shard again.") from None
    return digest.hexdigest()

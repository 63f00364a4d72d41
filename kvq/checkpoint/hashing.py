"""The hashes by which files are told apart: sha256, and git's of a blob."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

CHUNK = 8 * 2**20


def read_chunks(path: Path) -> Iterator[bytes]:
    """A file's bytes, 8 MiB at a time."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def git_blob_sha1(chunks: Iterable[bytes], size: int) -> str:
    """Git's name of a blob: sha1 of `blob <size>`, a zero byte and the content."""
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()

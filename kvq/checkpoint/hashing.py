"""The hash by which files are told apart."""

import hashlib
from pathlib import Path

HASH_CHUNK = 8 * 2**20


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()

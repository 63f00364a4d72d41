"""Files of a folder that strangers made: read only what lies in it, and only what JSON allows.

A checkpoint is downloaded; whoever made it chose every name, link and length in it.
"""

import json
import math
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from kvq.errors import CheckpointError

HUB_BLOB = re.compile(r"models--[^/]+/blobs/([0-9a-f]{40}|[0-9a-f]{64})$")


def check_links(folder: Path) -> None:
    """Refuse a folder with links that lead out of it: what they lead to would be read, and copied into the output.

    The Hub cache is made of links to `models--*/blobs/<hash>`; these are let through. Raises CheckpointError.
    """
    root = folder.resolve()
    for path in folder.rglob("*"):
        if not path.is_symlink():
            continue
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root) and not HUB_BLOB.search(target.as_posix()):
            raise CheckpointError(
                f"{path} is a link that leads out of the folder, to {target}; kvq reads nothing outside a checkpoint. "
                "Put the file itself there, or a hard link."
            )


def inside(folder: Path, name: str) -> Path | None:
    """The path of a name that a file of the folder gives, None for one that would lead out of it."""
    relative = Path(name)
    if relative.is_absolute() or not relative.parts or ".." in relative.parts or "\0" in name:
        return None
    return folder / relative


def check_regular(path: Path, max_bytes: int | None = None) -> os.stat_result:
    """Refuse pipes and devices, which may never end, and files too large to be what they should be.

    Raises CheckpointError for these, OSError for a file that is not there.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: is not a regular file. Put the file itself there.")
    if max_bytes is not None and status.st_size > max_bytes:
        raise CheckpointError(
            f"{path}: has {status.st_size} bytes, more than the {max_bytes} that kvq reads of such a file. "
            "Download the file again."
        )
    return status


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8, that can be written again. Raises ValueError or RecursionError."""
    value = json.loads(
        text.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_no_duplicates
    )
    if b"\\u" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON, and could not be written again")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is no number that a float can hold")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {twice[:80]!r} stands twice")
    return result

"""A Hub repository's config, index and shard headers, without its weights: two range requests a shard, no more.

The first asks for the eight bytes that say how long the header is, the second for the header. Answers are not trusted:
a length is checked against the file's size before it is asked for, and a server that ignores ranges is left at once.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvq.checkpoint.header import TensorInfo, check_length, parse_header
from kvq.checkpoint.hub import Note, hub_errors, hub_info
from kvq.checkpoint.index import INDEX_NAME, CheckpointIndex, assemble_index, load_json
from kvq.errors import HubError

CONNECTIONS = 8
TIMEOUT_SECONDS = 30


def hub_metadata(repo: str, revision: str | None, note: Note) -> tuple[dict[str, Any], CheckpointIndex, str]:
    """Config, index and commit. Raises CheckpointError for what is damaged, HubError if the Hub does not deliver."""
    from huggingface_hub import hf_hub_download

    with hub_errors(repo):
        info = hub_info(repo, revision, note)
        commit, files = info.sha, [file.rfilename for file in info.siblings or ()]
        if "config.json" not in files:
            raise HubError(f"{repo}: the repository has no config.json; it is no checkpoint that kvq can plan for.")
        folder = Path(hf_hub_download(repo, "config.json", revision=commit)).parent
        if INDEX_NAME in files:
            hf_hub_download(repo, INDEX_NAME, revision=commit)
    shards = sorted(name for name in files if name.endswith(".safetensors") and "/" not in name)

    def read_headers(names: Sequence[str]) -> dict[str, list[TensorInfo]]:
        with hub_errors(repo), ThreadPoolExecutor(CONNECTIONS) as pool:
            return dict(
                zip(names, pool.map(lambda name: _read_header(repo, commit, folder / name), names), strict=True)
            )

    config = load_json(folder / "config.json")
    return config, assemble_index(folder, shards, read_headers), commit


def _read_header(repo: str, commit: str, path: Path) -> list[TensorInfo]:
    """Tensors of one shard; `path` is where it would lie, for messages."""
    start, size = _get_range(repo, commit, path.name, 0, 8)
    length = int.from_bytes(start, "little")
    check_length(path, length, size)
    text, size = _get_range(repo, commit, path.name, 8, length)
    return parse_header(path, size, length, text)


def _get_range(repo: str, commit: str, name: str, offset: int, count: int) -> tuple[bytes, int]:
    """`count` bytes from `offset`, and the size of the whole file. Nothing beyond the range is read."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status

    headers = {**build_hf_headers(), "Range": f"bytes={offset}-{offset + count - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo, name, revision=commit)
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True) as response:
        if response.is_error:
            response.read()
            hf_raise_for_status(response)
        answered = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.headers.get("Content-Range", ""))
        if response.status_code != 206 or answered is None or int(answered[1]) != offset:
            raise HubError(
                f"{repo}: {name}: the server does not answer range requests; download it and give the folder."
            )
        size, parts, got = int(answered[3]), [], 0
        for part in response.iter_raw():
            parts.append(part)
            got += len(part)
            if got >= count:
                break
    data = b"".join(parts)[:count]
    if len(data) < min(count, size - offset):
        raise HubError(f"{repo}: {name}: the Hub sent {len(data)} of {count} bytes. Run the same command again.")
    return data, size

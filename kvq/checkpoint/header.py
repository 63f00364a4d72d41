"""The header of a safetensors file, read as untrusted input.

Why not the library: a plan must know every tensor's dtype, shape and byte range of 140 shards in seconds, and
must say which file is truncated. Tensor data itself is always read through safetensors.
"""

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from kvq.checkpoint.untrusted import check_regular, parse_json
from kvq.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit that the safetensors library itself sets
MAX_NAME = 4096
SIZE_LIMIT = 2**60

DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """One tensor as its header describes it. `offset` counts from the start of the file. A tuple: there are many."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


@lru_cache(maxsize=4096)
def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a safetensors dtype."""
    return (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8


# The order in which safetensors lays tensors out: by dtype, then by name.
LAYOUT_ORDER = (
    "U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8",
    "F4", "BOOL",
)  # fmt: skip
EMPTY_ENTRY = ',"":{"dtype":"","shape":[],"data_offsets":[,]}'
METADATA_ENTRY = '"__metadata__":{"format":"pt"}'


def file_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> int:
    """Size of the file that safetensors writes for tensors of these names, dtypes and shapes, its header included."""
    by_dtype: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, dtype, shape in tensors:
        by_dtype.setdefault(dtype, []).append((name, shape))
    length, end, digits = len(METADATA_ENTRY) + 2, 0, 1
    for dtype in sorted(by_dtype, key=LAYOUT_ORDER.index):
        rows = sorted(by_dtype[dtype])
        length += len(rows) * (len(dtype) + len(EMPTY_ENTRY)) + _text_length("".join(name for name, _ in rows))
        for _, shape in rows:
            end += tensor_bytes(dtype, shape)
            length += _shape_length(shape) + digits
            digits = len(str(end))
            length += digits
    return 8 + -(-length // 8) * 8 + end


def _text_length(names: str) -> int:
    """Bytes of names as JSON writes them, without their quotation marks."""
    if names.isascii() and names.isprintable() and '"' not in names and "\\" not in names:
        return len(names)
    return len(json.dumps(names, ensure_ascii=False).encode()) - 2


@lru_cache(maxsize=4096)
def _shape_length(shape: tuple[int, ...]) -> int:
    return len(",".join(map(str, shape)))


def read_header(path: Path) -> list[TensorInfo]:
    """Tensors of one file, in file order. Raises CheckpointError when the file is not whole or not safetensors."""
    return parse_header(path, *_read_text(path))


def check_length(path: Path, length: int, size: int) -> None:
    """Refuse, before it is read, a header that would not fit its file or is larger than safetensors allows."""
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{path}: not a whole safetensors file (its header would be {length} bytes, the file has {size}). "
            "Download this shard again."
        )


def parse_header(path: Path, size: int, length: int, text: bytes) -> list[TensorInfo]:
    """Tensors that a header of `length` bytes describes, in file order, checked against the `size` of its file."""
    try:
        entries = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: the safetensors header is damaged ({error}). Download this shard again."
        ) from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object. Download this shard again.")
    entries.pop("__metadata__", None)
    # An empty tensor starts where the next one does, and comes before it.
    shard = path.name
    tensors = sorted(
        (_tensor(path, shard, name, entry, 8 + length) for name, entry in entries.items()),
        key=attrgetter("offset", "nbytes"),
    )
    _check_layout(path, tensors, start=8 + length, size=size)
    return tensors


def _read_text(path: Path) -> tuple[int, int, bytes]:
    """Size of the file, length of its header, the header's text."""
    try:
        size = check_regular(path).st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            check_length(path, length, size)
            return size, length, file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Download this shard again.") from None


def _are_sizes(values: Any) -> bool:
    """A list of whole numbers that no arithmetic can overflow. Checked a hundred thousand times: no calls inside."""
    if values.__class__ is not list:
        return False
    for value in values:
        if value.__class__ is not int or not 0 <= value < SIZE_LIMIT:
            return False
    return True


def _tensor(path: Path, shard: str, name: str, entry: Any, start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: header entry {name!r} is not an object. Download this shard again.")
    if len(name) > MAX_NAME:
        raise CheckpointError(f"{path}: a tensor's name has {len(name)} characters. Download this shard again.")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name} has dtype {_short(dtype)}, which kvq does not know.")
    if not _are_sizes(shape):
        raise CheckpointError(f"{path}: tensor {name} has shape {_short(shape)}. Download this shard again.")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name} has data_offsets {_short(offsets)}. Download this shard again.")
    nbytes, dims = offsets[1] - offsets[0], tuple(shape)
    if nbytes != tensor_bytes(dtype, dims):
        raise CheckpointError(
            f"{path}: tensor {name} ({dtype} {shape}) needs {tensor_bytes(dtype, dims)} bytes but its "
            f"data_offsets span {nbytes}. Download this shard again."
        )
    return TensorInfo(name, dtype, dims, shard, start + offsets[0], nbytes)


def _short(value: Any) -> str:
    """Enough of a value to see what is wrong; the whole may be megabytes."""
    short = value[:8] if isinstance(value, list | str) else list(value)[:8] if isinstance(value, dict) else value
    return repr(short)[:100]


def _check_layout(path: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    """Tensors must lie one after the other and fill the file: no gap, no overlap, nothing missing at the end."""
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} starts at byte {tensor.offset}, expected {end}: tensors overlap or "
                "leave a gap. Download this shard again."
            )
        end += tensor.nbytes
    if end != size:
        raise CheckpointError(
            f"{path}: the header describes {end} bytes but the file has {size}: it is truncated or damaged. "
            "Download this shard again."
        )

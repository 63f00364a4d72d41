"""Headers are untrusted input: whatever the bytes are, the answer is the tensors or one CheckpointError."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvq.checkpoint import header
from kvq.checkpoint.header import file_bytes, read_header, tensor_bytes
from kvq.errors import CheckpointError


def write_raw(folder: Path, text: Any, data: bytes = b"") -> Path:
    """A file with this header, given as bytes or as an object."""
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    path = folder / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(start: int, stop: int, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {
        "fp8": torch.randn(3, 5).to(torch.float8_e4m3fn),
        "bf16": torch.randn(2, 3, 4).bfloat16(),
        "f32": torch.randn(7),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "words": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    data, found = path.read_bytes(), read_header(path)
    dtypes = {"fp8": "F8_E4M3", "bf16": "BF16", "f32": "F32", "scalar": "I64", "words": "I32", "empty": "BF16"}
    assert {info.name: info.dtype for info in found} == dtypes
    assert {info.name: info.shape for info in found} == {name: tuple(t.shape) for name, t in tensors.items()}
    assert {info.shard for info in found} == {"x.safetensors"}
    for info in found:
        stored = data[info.offset : info.offset + info.nbytes]
        assert stored == bytes(tensors[info.name].reshape(-1).view(torch.uint8).tolist())


def test_tensors_come_in_file_order_and_metadata_is_none(tmp_path: Path) -> None:
    text = {"b": entry(0, 4), "__metadata__": {"format": "pt"}, "c": entry(6, 8), "a": entry(4, 6)}
    assert [info.name for info in read_header(write_raw(tmp_path, text, bytes(8)))] == ["b", "a", "c"]


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_empty_tensor_may_stand_anywhere_in_the_header(tmp_path: Path, names: tuple[str, str]) -> None:
    ranges = {"a": entry(0, 8), "b": entry(0, 0)}
    path = write_raw(tmp_path, {name: ranges[name] for name in names}, bytes(8))
    assert [info.name for info in read_header(path)] == ["b", "a"]


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"), [("F4", (3, 3), 5), ("BF16", (3, 3), 18), ("F32", (), 4), ("I64", (0,), 0)]
)
def test_tensor_bytes(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert tensor_bytes(dtype, shape) == nbytes


DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "tensor b starts at byte"),
    "same place twice": ({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8), "overlap or leave a gap"),
    "gap": ({"a": entry(0, 8), "b": entry(12, 16)}, bytes(16), "overlap or leave a gap"),
    "gap at the start": ({"a": entry(4, 8)}, bytes(8), "overlap or leave a gap"),
    "bytes after the last tensor": ({"a": entry(0, 8)}, bytes(9), "truncated or damaged"),
    "bytes missing": ({"a": entry(0, 8)}, bytes(7), "truncated or damaged"),
    "no tensor but data": ({}, bytes(1), "truncated or damaged"),
    "name twice": (b'{"a": {}, "a": {}}', b"", "the name 'a' stands twice"),
    "field twice": (b'{"a": {"dtype": "U8", "dtype": "I8"}}', b"", "the name 'dtype' stands twice"),
    "unknown dtype": ({"a": entry(0, 8, "F128")}, bytes(8), "dtype 'F128'"),
    "dtype is a list": ({"a": entry(0, 8, ["U8"])}, bytes(8), "dtype"),
    "no dtype": ({"a": {"shape": [8], "data_offsets": [0, 8]}}, bytes(8), "dtype None"),
    "shape against offsets": ({"a": entry(0, 8, "BF16", [3])}, bytes(8), "needs 6 bytes but its data_offsets span 8"),
    "huge shape": ({"a": entry(0, 8, "U8", [2**59] * 9)}, bytes(8), "data_offsets span 8"),
    "negative shape": ({"a": entry(0, 8, "U8", [-2, -4])}, bytes(8), "shape"),
    "shape of truth values": ({"a": entry(0, 1, "U8", [True])}, bytes(1), "shape"),
    "fractional shape": ({"a": entry(0, 8, "U8", [8.0])}, bytes(8), "shape"),
    "shape is no list": ({"a": entry(0, 8, "U8", "8")}, bytes(8), "shape"),
    "offsets reversed": ({"a": entry(8, 0, "U8", [8])}, bytes(8), "span -8"),
    "offsets negative": ({"a": entry(-8, 0)}, bytes(8), "data_offsets"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 8]}}, bytes(8), "data_offsets"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [8]}}, bytes(8), "data_offsets None"),
    "offset out of all bounds": ({"a": entry(2**64, 2**64 + 8)}, bytes(8), "data_offsets"),
    "entry is no object": ({"a": [1]}, b"", "'a' is not an object"),
    "a list": ([], b"", "not a JSON object"),
    "not JSON": (b"{'a': 1}", b"", "header is damaged"),
    "empty header": (b"", b"", "header is damaged"),
    "not UTF-8": (b'{"\xff": 1}', b"", "header is damaged"),
    "deep nesting": (b"[" * 100_000, b"", "header is damaged"),
    "deep objects": (b'{"a":' * 100_000, b"", "header is damaged"),
    "number of many digits": (b'{"a": {"shape": [' + b"9" * 5000 + b"]}}", b"", "header is damaged"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_header_is_refused_by_name(tmp_path: Path, case: str) -> None:
    text, data, expected = DAMAGED[case]
    path = write_raw(tmp_path, text, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and expected in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"\x01", bytes(7), b"\xff" * 8, b"\xff" * 64, (60).to_bytes(8, "little") + b"{}"])
def test_length_beyond_the_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_header(path)


def test_header_above_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_raw(tmp_path, {"a": entry(0, 8)}, bytes(8))
    assert len(read_header(path)) == 1
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", 16)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_header(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3, 3), "b": torch.ones(5, dtype=torch.int8)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(path)


def test_changed_bytes_never_end_in_another_exception(tmp_path: Path) -> None:
    path = write_raw(tmp_path, {"a": entry(0, 4), "b": entry(4, 12, "BF16", [2, 2])}, bytes(12))
    whole = path.read_bytes()
    refused = 0
    for position in range(len(whole) - 12):
        for value in b'\x00\xff"[{9-,':
            path.write_bytes(whole[:position] + bytes([value]) + whole[position + 1 :])
            try:
                read_header(path)
            except CheckpointError:
                refused += 1
    assert refused > 500  # the others changed no more than a name


def test_link_to_nothing_and_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("gone.safetensors", "folder.safetensors"):
        with pytest.raises(CheckpointError, match=name):
            read_header(tmp_path / name)


@pytest.mark.parametrize("seed", range(20))
def test_file_size_is_what_safetensors_writes(tmp_path: Path, seed: int) -> None:
    """Names of all lengths and scripts, all dtypes, empty tensors and scalars: the size to the byte."""
    draw = random.Random(seed)
    dtypes = {
        "BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "I32": torch.int32, "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U8": torch.uint8, "I8": torch.int8,
        "BOOL": torch.bool, "I16": torch.int16, "F64": torch.float64,
    }  # fmt: skip
    tensors, described = {}, []
    for number in range(draw.randrange(1, 40)):
        name = "".join(draw.choice('ab."\\/\n\u00e9\u4e2d') for _ in range(draw.randrange(30))) + str(number)
        shape = tuple(draw.randrange(0, 12) for _ in range(draw.randrange(0, 4)))
        dtype = draw.choice(sorted(dtypes))
        tensors[name] = torch.zeros(shape, dtype=dtypes[dtype])
        described.append((name, dtype, shape))
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    draw.shuffle(described)
    assert file_bytes(described) == (tmp_path / "x.safetensors").stat().st_size

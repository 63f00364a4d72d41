"""The index: what the folder promises, checked against what its shards hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvq.checkpoint.index import load_index, load_json
from kvq.errors import CheckpointError
from tests.checkpoints import (
    INDEX,
    drop_tensor,
    make_checkpoint,
    read_json,
    read_tensors,
    rewrite_index,
    shard_of,
    truncate_shard,
    write_json,
)

NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "kimi_k2")


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_index(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_index_describes_every_tensor(folder: Path) -> None:
    index, tensors = load_index(folder), read_tensors(folder)
    assert {name: info.shape for name, info in index.tensors.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {name: info.nbytes for name, info in index.tensors.items()} == {n: t.nbytes for n, t in tensors.items()}
    assert {name: info.shard for name, info in index.tensors.items()} == read_json(folder / INDEX)["weight_map"]
    assert index.total_bytes == read_json(folder / INDEX)["metadata"]["total_size"]
    assert index.shards == tuple(sorted(path.name for path in folder.glob("*.safetensors")))
    assert index.warnings == ()


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "kimi_k2", single_file=True)
    index = load_index(folder)
    assert index.shards == ("model.safetensors",)
    assert set(index.tensors) == set(read_tensors(folder))


def test_several_files_need_an_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert f"found 3 *.safetensors files and no {INDEX}" in refused(folder)


def test_folder_without_weights(tmp_path: Path) -> None:
    assert "found 0 *.safetensors files" in refused(tmp_path)


def test_absent_tensor_is_named_with_its_shard(folder: Path) -> None:
    shard = shard_of(folder, NORM).name
    drop_tensor(folder, NORM, keep_in_index=True)
    assert f"says that {shard} holds {NORM}, but it does not" in refused(folder)


def test_tensor_in_another_shard_than_the_index_says(folder: Path) -> None:
    other = next(path.name for path in folder.glob("*.safetensors") if path != shard_of(folder, NORM))
    rewrite_index(folder, lambda index: index["weight_map"].update({NORM: other}))
    assert f"says that {other} holds {NORM}" in refused(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    shard = shard_of(folder, NORM)
    shard.unlink()
    assert f"1 of 3 shards are missing, the first is {shard.name}" in refused(folder)


def test_shard_whose_blob_is_gone_from_the_cache(folder: Path) -> None:
    shard = shard_of(folder, NORM)
    shard.unlink()
    shard.symlink_to(folder / "blobs" / "gone")
    assert shard.name in refused(folder)


def test_truncated_shard_is_named(folder: Path) -> None:
    truncate_shard(folder, NORM)
    assert shard_of(folder, NORM).name in refused(folder)


@pytest.mark.parametrize(
    "place",
    ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "./x.safetensors", "x.bin", "", "..", 3, None, ["x"]],
)
def test_path_outside_the_folder_is_refused(folder: Path, place: Any) -> None:
    save_file({NORM: torch.ones(2)}, folder.parent / "x.safetensors")
    rewrite_index(folder, lambda index: index["weight_map"].update({NORM: place}))
    assert f"maps {NORM} to {place!r}, which is not a file name in this folder" in refused(folder)


def test_unindexed_shard_is_taken_in_with_a_warning(folder: Path) -> None:
    save_file({"model.layers.9.b": torch.ones(2), "model.layers.9.a": torch.ones(3)}, folder / "mtp.safetensors")
    index = load_index(folder)
    assert index["model.layers.9.a"].shape == (3,) and "mtp.safetensors" in index.shards
    (warning,) = index.warnings
    assert warning.startswith("mtp.safetensors holds 2 tensors that the index does not list")


def test_unindexed_tensor_of_a_listed_shard_is_taken_in(folder: Path) -> None:
    rewrite_index(folder, lambda index: index["weight_map"].pop(NORM))
    index = load_index(folder)
    assert NORM in index and len(index.warnings) == 1 and NORM in index.warnings[0]


def test_copy_of_an_indexed_tensor_does_not_replace_it(folder: Path) -> None:
    shard = shard_of(folder, NORM).name
    save_file({NORM: torch.ones(2)}, folder / "a.safetensors")
    index = load_index(folder)
    assert index[NORM].shard == shard and index.warnings == () and "a.safetensors" not in index.shards


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_weight_map(folder: Path, weight_map: Any) -> None:
    write_json(folder / INDEX, {"weight_map": weight_map})
    assert "has no weight_map" in refused(folder)


def test_unknown_tensor_is_an_error_that_names_it(folder: Path) -> None:
    index = load_index(folder)
    assert "no.such" not in index
    with pytest.raises(CheckpointError, match=r"the checkpoint has no tensor no\.such"):
        index["no.such"]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b'{"a": -Infinity}', b"[1]", b"3"]
)
def test_json_that_is_no_object_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        load_json(tmp_path / "config.json")


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.json: is not a regular file"):
        load_json(tmp_path / "folder.json")
    with pytest.raises(CheckpointError, match="no such file"):
        load_json(tmp_path / "absent.json")

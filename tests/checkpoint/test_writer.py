"""The writer: a whole folder under its name, or none."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kvq.checkpoint.hashing import sha256_file
from kvq.checkpoint.index import INDEX_NAME, load_index
from kvq.checkpoint.writer import SPARE_BYTES, CheckpointWriter, bytes_of, check_output, dump_json
from kvq.errors import OutputError

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    "a": torch.linspace(-4, 4, 16).reshape(4, 4).to(torch.float8_e4m3fn),
    "c": torch.ones(5, dtype=torch.bfloat16),
}
TOTAL = 6 * 4 + 16 + 5 * 2


def write_all(out: Path) -> CheckpointWriter:
    with CheckpointWriter(out) as writer:
        writer.add_shard("model-00001-of-00002.safetensors", {name: TENSORS[name] for name in ("b", "a")})
        writer.add_shard("model-00002-of-00002.safetensors", {"c": TENSORS["c"]})
        writer.add_text("config.json", "{}\n")
        writer.add_index()
        writer.publish()
    return writer


def test_written_folder_reads_back(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    write_all(out)
    index = load_index(out)
    assert index.total_bytes == TOTAL and index.warnings == ()
    found = {name: tensor for shard in index.shards for name, tensor in load_file(out / shard).items()}
    assert set(found) == set(TENSORS)
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in TENSORS.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_index_states_the_size_of_the_tensors_and_sorted_names(tmp_path: Path) -> None:
    write_all(tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": TOTAL}
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert list(index["weight_map"].items()) == [("a", first), ("b", first), ("c", second)]


def test_shards_are_marked_as_torch_files(tmp_path: Path) -> None:
    write_all(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model-00002-of-00002.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    writer = write_all(tmp_path / "out")
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out").iterdir()}
    assert writer.sha256 == files and len(files) == 4


def test_hash_of_a_file_longer_than_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq.checkpoint.hashing.CHUNK", 7)
    (tmp_path / "x").write_bytes(b"0123456789abcdef")
    assert sha256_file(tmp_path / "x") == hashlib.sha256(b"0123456789abcdef").hexdigest()


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    assert write_all(tmp_path / "one").sha256 == write_all(tmp_path / "two").sha256


def test_nothing_under_the_final_name_before_publish(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with CheckpointWriter(out) as writer:
        writer.add_shard("model.safetensors", dict(TENSORS))
        writer.add_index()
        assert not out.exists() and (tmp_path / "out.partial" / "model.safetensors").exists()
        writer.publish()
        assert out.is_dir() and not (tmp_path / "out.partial").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_error_inside_leaves_no_output(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), CheckpointWriter(tmp_path / "out") as writer:
        writer.add_shard("model.safetensors", dict(TENSORS))
        raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial"]


def test_partial_that_is_left_refuses(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(OutputError, match=r"out\.partial is left from a run that did not finish"):
        CheckpointWriter(tmp_path / "out").__enter__()
    assert list((tmp_path / "out.partial").iterdir()) == []


def test_empty_folder_may_be_the_output(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    check_output(tmp_path / "out", 0)
    write_all(tmp_path / "out")
    assert (tmp_path / "out" / INDEX_NAME).exists()


def test_folder_that_fills_up_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match=r"is whole in .*partial; remove .*name\.$"), CheckpointWriter(out) as writer:
        out.mkdir()
        (out / "precious").write_text("x")
        writer.publish()
    assert (out / "precious").read_text() == "x"


def test_side_files_keep_their_bytes_and_places(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "docs").mkdir(parents=True)
    (source / "docs" / "a.md").write_bytes(b"\xff\x00 no newline")
    (source / "README.md").write_text("old")
    with CheckpointWriter(out) as writer:
        writer.copy_file(source, Path("docs/a.md"))
        writer.copy_file(source, Path("README.md"), "SOURCE_README.md")
        writer.publish()
    assert (out / "docs" / "a.md").read_bytes() == b"\xff\x00 no newline"
    assert (out / "SOURCE_README.md").read_text() == "old" and not (out / "README.md").exists()
    assert set(writer.sha256) == {"docs/a.md", "SOURCE_README.md"}


def test_a_tensor_is_written_once(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add_shard("one.safetensors", {"a": torch.ones(1)})
        with pytest.raises(AssertionError, match="written twice"):
            writer.add_shard("two.safetensors", {"a": torch.ones(1)})


def test_failure_of_the_safetensors_library_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="writing failed"), CheckpointWriter(tmp_path / "out") as writer:
        writer.add_shard("no-such-folder/model.safetensors", dict(TENSORS))
    assert not (tmp_path / "out").exists()


def test_failure_of_the_system_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="writing failed \\(No space left on device\\)"):
        write_all(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot be made"):
        CheckpointWriter(tmp_path / "file" / "out").__enter__()


# Before anything is read.


def test_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".hidden").write_text("x")
    with pytest.raises(OutputError, match="is not empty; kvq never overwrites a checkpoint"):
        check_output(tmp_path / "out", 0)


def test_file_and_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder").symlink_to(tmp_path)
    for name in ("file", "link", "folder"):
        with pytest.raises(OutputError, match=f"{name} exists and is not a folder"):
            check_output(tmp_path / name, 0)


@pytest.mark.parametrize("name", [".", "..", "/", "a/.."])
def test_output_needs_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="is not the name of a new folder"):
        check_output(Path(name), 0)


@pytest.mark.parametrize("out", ["out", "a/b/out"])
def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=10**9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    check_output(tmp_path / out, 10**9 - SPARE_BYTES)
    with pytest.raises(OutputError, match=r"needs 1\.00 GB and 1\.00 GB are free"):
        check_output(tmp_path / out, 10**9 - SPARE_BYTES + 1)
    with pytest.raises(OutputError, match=r"needs 5\.07 GB and 1\.00 GB are free"):
        check_output(tmp_path / out, 5 * 10**9)
    assert asked == [tmp_path] * 3 and list(tmp_path.iterdir()) == []


def test_a_place_below_a_file_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"file is a file, so .*file/deep/out cannot be made below it"):
        check_output(tmp_path / "file" / "deep" / "out", 0)


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OutputError, match="is not writable"):
        check_output(tmp_path / "out", 0)


def test_json_is_readable_and_strict() -> None:
    assert dump_json({"b": [1], "a": "\u00e9"}) == '{\n  "b": [\n    1\n  ],\n  "a": "\u00e9"\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        dump_json({"a": float("nan")})


def test_bytes_of_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3))
    (tmp_path / "b").write_bytes(bytes(4))
    assert bytes_of(tmp_path.iterdir()) == 7 and bytes_of([]) == 0

"""Damage that leaves a checkpoint loadable: `kvq verify` finds it by hashes, and where these fit, by the source."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvq.checkpoint.index import MANIFEST_NAME
from tests.checkpoints import INDEX, edit_tensor, read_json, read_tensors, rewrite_index, shard_of
from tests.runs import Shared, manifest_of, rewrite_manifest
from tests.verify.conftest import Verify, failed

ONE, OTHER = "model.layers.1.mlp.experts.2", "model.layers.1.mlp.experts.6"
MTP = "model.layers.3."
PARTS = ("weight_packed", "weight_scale", "weight_shape")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def flip(name: str, place: int = 40) -> Callable[[Path], object]:
    """One bit of a tensor, in its shard's bytes."""

    def damage(folder: Path) -> None:
        def change(tensor: Tensor) -> Tensor:
            data = tensor.contiguous().view(-1).view(torch.uint8)
            data[place % data.numel()] ^= 2
            return tensor

        edit_tensor(folder, name, change)

    return damage


def swap_nibbles(words: int | None) -> Callable[[Path], object]:
    """The two codes of each byte exchanged, in so many packed words or in all."""

    def change(tensor: Tensor) -> Tensor:
        data = tensor.view(-1)[:words].view(torch.uint8)
        data.copy_((data >> 4) | (data << 4))
        return tensor

    return lambda folder: edit_tensor(folder, f"{ONE}.up_proj.weight_packed", change)


def replace_expert(folder: Path, projections: tuple[str, ...] = PROJECTIONS, back: bool = False) -> None:
    """One expert's matrices put in place of another's; with `back` the two are exchanged."""
    shard = shard_of(folder, f"{ONE}.gate_proj.weight_packed")
    tensors = load_file(shard)
    for projection in projections:
        for part in PARTS:
            one, other = f"{ONE}.{projection}.{part}", f"{OTHER}.{projection}.{part}"
            tensors[one], tensors[other] = tensors[other].clone(), (tensors[one] if back else tensors[other]).clone()
    save_file(tensors, shard, metadata={"format": "pt"})


def unquantize(folder: Path) -> None:
    """An expert's matrix in BF16, as tools that miss it leave it."""
    shard = shard_of(folder, f"{ONE}.up_proj.weight_packed")
    tensors = load_file(shard)
    for part in PARTS:
        del tensors[f"{ONE}.up_proj.{part}"]
    tensors[f"{ONE}.up_proj.weight"] = torch.ones(64, 64, dtype=torch.bfloat16)
    save_file(tensors, shard, metadata={"format": "pt"})

    def change(index: dict[str, dict[str, object]]) -> None:
        for part in PARTS:
            del index["weight_map"][f"{ONE}.up_proj.{part}"]
        index["weight_map"][f"{ONE}.up_proj.weight"] = shard.name

    rewrite_index(folder, change)


def unindex_mtp(folder: Path) -> None:
    """The draft layer's shard is there, the index does not say so."""

    def change(index: dict[str, dict[str, object]]) -> None:
        index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if not name.startswith(MTP)}

    rewrite_index(folder, change)


def wrong_shard(folder: Path) -> None:
    wrong = shard_of(folder, "lm_head.weight").name
    rewrite_index(folder, lambda index: index["weight_map"].update({f"{ONE}.up_proj.weight_packed": wrong}))


def scale(value: float) -> Callable[[Path], object]:
    return lambda folder: edit_tensor(folder, f"{ONE}.up_proj.weight_scale", lambda old: old.fill_(value))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "bit of a code": flip(f"{ONE}.up_proj.weight_packed"),
    "nibbles of a word": swap_nibbles(words=1),
    "nibbles of a matrix": swap_nibbles(words=None),
    "bit of a scale": flip(f"{ONE}.down_proj.weight_scale", place=1),
    "bit of attention": flip("model.layers.0.self_attn.o_proj.weight"),
    "bit of the router": flip("model.layers.1.mlp.gate.weight"),
    "bit of the head": flip("lm_head.weight"),
    "bit of a norm": flip("model.layers.1.input_layernorm.weight"),
    "an expert twice": replace_expert,
    "two experts exchanged": lambda folder: replace_expert(folder, back=True),
    "one matrix of two experts exchanged": lambda folder: replace_expert(folder, ("down_proj",), back=True),
    "scale 0": scale(0.0),
    "scale Inf": scale(float("inf")),
    "scale NaN": scale(float("nan")),
    "scale doubled": lambda folder: edit_tensor(folder, f"{ONE}.up_proj.weight_scale", lambda old: old * 2),
    "expert left unquantized": unquantize,
    "wrong shard": wrong_shard,
    "total_size": lambda folder: rewrite_index(folder, lambda index: index["metadata"].update(total_size=4)),
    "MTP shard unindexed": unindex_mtp,
}


# One code of 4096 is off by two: with hashes made to fit, the weight's error stays within what verify allows for the
# difference between the devices that measure it (1e-3), so only the original hash tells.
ONLY_BY_HASH = "bit of a code"
# Eight codes of 4096: the manifest's recorded error gives it away; without that it is no more than INT4 itself costs.
NOT_WITHOUT_MANIFEST = (ONLY_BY_HASH, "nibbles of a word")


def fit(folder: Path) -> None:
    """Hashes and total_size that fit what is there now: the damage was done before they were taken."""
    if (folder / INDEX).exists() and read_json(folder / INDEX)["metadata"]["total_size"] != 4:
        total = sum(tensor.nbytes for tensor in read_tensors(folder).values())
        rewrite_index(folder, lambda index: index["metadata"].update(total_size=total))
    rewrite_manifest(folder, manifest_of(folder))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_after_writing_is_found_from_the_files_alone(damaged: Path, verify: Verify, name: str) -> None:
    DAMAGE[name](damaged)
    assert "files" in failed(verify(damaged))


@pytest.mark.parametrize("name", [name for name in DAMAGE if name != ONLY_BY_HASH])
def test_damage_before_hashing_is_found_with_the_source(
    shared: Shared, damaged: Path, verify: Verify, name: str
) -> None:
    DAMAGE[name](damaged)
    fit(damaged)
    problems = failed(verify(damaged, shared.source("glm-5")))
    assert problems and "files" not in problems, problems


@pytest.mark.parametrize("name", [name for name in DAMAGE if name not in NOT_WITHOUT_MANIFEST])
def test_without_a_manifest_the_source_tells(shared: Shared, damaged: Path, verify: Verify, name: str) -> None:
    """Hardest: no hash, no plan, no recorded errors. What stays below INT4's own rounding cannot be told from it."""
    DAMAGE[name](damaged)
    fit(damaged)
    (damaged / MANIFEST_NAME).unlink()
    assert failed(verify(damaged, shared.source("glm-5")))


@pytest.mark.parametrize("left_out", ["model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_tensor_left_out_is_missed_without_a_manifest(
    shared: Shared, damaged: Path, verify: Verify, left_out: str
) -> None:
    shard = shard_of(damaged, left_out)
    tensors = load_file(shard)
    gone = [name for name in tensors if name.startswith(left_out)]
    for name in gone:
        del tensors[name]
    rewrite_index(damaged, lambda index: [index["weight_map"].pop(name) for name in gone])
    save_file(tensors, shard, metadata={"format": "pt"})
    fit(damaged)
    (damaged / MANIFEST_NAME).unlink()
    assert left_out in failed(verify(damaged, shared.source("glm-5")))["kept tensors"][0]


def test_a_folder_without_manifest_does_not_pass_unasked(shared: Shared, damaged: Path, verify: Verify) -> None:
    (damaged / MANIFEST_NAME).unlink()
    (problem,) = failed(verify(damaged))["manifest"]
    assert "--source" in problem and "--without-manifest" in problem
    assert verify(damaged, without_manifest=True).passed
    assert verify(damaged, shared.source("glm-5")).passed


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "", "a\0b"])
def test_a_manifest_reads_no_file_outside(damaged: Path, verify: Verify, name: str) -> None:
    (damaged.parent / "secret").write_text("x")
    manifest = manifest_of(damaged)
    manifest["files"][name] = "0" * 64
    (damaged / MANIFEST_NAME).write_text(json.dumps(manifest))
    (problem,) = failed(verify(damaged))["manifest"]
    assert "no file of this folder" in problem


def test_the_output_is_whole_before_any_damage(shared: Shared, verify: Verify, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(shared.output("glm-5"), tmp_path / "copy"))
    fit(copy)
    assert verify(copy, shared.source("glm-5")).passed

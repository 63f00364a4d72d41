"""The reader: stored values as they are, damaged values never."""

import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq.checkpoint.reader import CheckpointReader, check_finite
from kvq.errors import CheckpointError
from tests.checkpoints import edit_tensor, make_checkpoint, read_json, read_tensors, truncate_shard

NORM = "model.norm.weight"
PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "kimi_k2")


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_every_tensor_comes_back_byte_for_byte(folder: Path) -> None:
    reader = CheckpointReader(folder)
    for name, expected in read_tensors(folder).items():
        found = reader.tensor(name)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(raw(found), raw(expected)), name


def test_config_is_read_as_it_is(folder: Path) -> None:
    assert CheckpointReader(folder).config == read_json(folder / "config.json")


def test_release_leaves_given_tensors_and_can_read_on(folder: Path) -> None:
    reader = CheckpointReader(folder)
    before = reader.tensor(PROJ)
    copy = before.clone()
    reader.release()
    assert torch.equal(raw(before), raw(copy))
    assert torch.equal(raw(reader.tensor(PROJ)), raw(copy))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_in_bf16(folder: Path, value: float) -> None:
    edit_tensor(folder, NORM, lambda tensor: tensor.index_fill(0, torch.tensor([5]), value))
    with pytest.raises(CheckpointError, match=f"model-.*safetensors: tensor {NORM} holds NaN or Inf"):
        CheckpointReader(folder).tensor(NORM)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_both_nans_of_fp8(folder: Path, code: int) -> None:
    def damage(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8)[3, 2] = code
        return tensor

    edit_tensor(folder, PROJ, damage)
    with pytest.raises(CheckpointError, match=f"tensor {PROJ} holds NaN or Inf"):
        CheckpointReader(folder).tensor(PROJ)


def test_all_other_fp8_codes_are_finite() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    check_finite(Path("shard"), "name", codes.view(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float16, torch.float32, torch.float64])
def test_finiteness_in_other_types(dtype: torch.dtype) -> None:
    check_finite(Path("shard"), "name", torch.ones(3).to(dtype))
    for value in (math.nan, math.inf):
        with pytest.raises(CheckpointError, match="shard: tensor name holds NaN or Inf"):
            check_finite(Path("shard"), "name", torch.tensor([0.0, value]).to(dtype))


def test_integers_and_empty_tensors_are_finite() -> None:
    check_finite(Path("shard"), "name", torch.tensor([-1, 2**31 - 1], dtype=torch.int32))
    check_finite(Path("shard"), "name", torch.zeros(0, dtype=torch.bfloat16))


def test_shard_that_changes_under_the_reader(folder: Path) -> None:
    reader = CheckpointReader(folder)
    truncate_shard(folder, NORM)
    with pytest.raises(CheckpointError, match=f"cannot read tensor {NORM}"):
        reader.tensor(NORM)


def test_unknown_tensor(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor model\.nothing"):
        CheckpointReader(folder).tensor("model.nothing")


def test_folder_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, said in (("file", "is a file"), ("nothing", "no such folder")):
        with pytest.raises(CheckpointError, match=f"{name}: {said}"):
            CheckpointReader(tmp_path / name)


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        CheckpointReader(folder)


def test_side_files_are_all_but_weights_and_hidden_ones(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "kimi_k25")
    extra = ["docs/deploy.md", "figures/a/b.png", ".gitattributes", ".cache/huggingface/x.lock", "__pycache__/m.pyc"]
    extra += ["sub/.hidden", "pytorch_model.bin", "original/consolidated.00.pth", "model.gguf"]
    for name in extra:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    expected = {
        "LICENSE", "README.md", "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "tiktoken.model", "configuration_deepseek.py", "configuration_kimi_k25.py",
        "modeling_deepseek.py", "modeling_kimi_k25.py", "tokenization_kimi.py", "docs/deploy.md", "figures/a/b.png",
    }  # fmt: skip
    found = [str(path) for path in CheckpointReader(folder).side_files()]
    assert set(found) == expected and len(found) == len(expected)


def hub_cache(folder: Path) -> Path:
    """A snapshot of the Hub cache, whose files are links to blobs."""
    place = folder.parent / "models--owner--name"
    (place / "snapshots").mkdir(parents=True)
    (place / "blobs").mkdir()
    snapshot = folder.rename(place / "snapshots" / ("0" * 40))
    for number, path in enumerate(sorted(snapshot.iterdir())):
        blob = place / "blobs" / f"{number:040x}"
        path.rename(blob)
        path.symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


def test_links_of_the_hub_cache_are_followed(folder: Path) -> None:
    expected = CheckpointReader(folder).side_files()
    snapshot = hub_cache(folder)
    reader = CheckpointReader(snapshot)
    assert reader.side_files() == expected and reader.tensor(NORM).numel() == 64
    # A folder of links to the cache, as older versions of the Hub's client made them.
    (links := folder.parent / "links").mkdir()
    for path in snapshot.iterdir():
        (links / path.name).symlink_to(path.resolve())
    assert CheckpointReader(links).side_files() == expected


def test_links_within_the_folder_are_followed(folder: Path) -> None:
    (folder / "other.jinja").symlink_to("chat_template.jinja")
    assert Path("other.jinja") in CheckpointReader(folder).side_files()


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "notes.txt", "config.json", "model-00001-of-000003.safetensors"]
)
@pytest.mark.parametrize("relative", [True, False])
def test_links_that_lead_out_of_the_folder_are_refused(folder: Path, name: str, relative: bool) -> None:
    """What they lead to would be read, and copied into the output: a stranger's `notes.txt -> ~/.ssh/id_rsa`."""
    secret = folder.parent / "secret"
    if (folder / name).exists():
        (folder / name).rename(secret)
    else:
        secret.write_text("secret")
    (folder / name).symlink_to("../secret" if relative else secret)
    with pytest.raises(CheckpointError, match=f"{name} is a link that leads out of the folder"):
        CheckpointReader(folder)


def test_a_link_to_a_folder_outside_is_refused(folder: Path) -> None:
    (folder / "sub").symlink_to("/")
    with pytest.raises(CheckpointError, match="sub is a link that leads out of the folder"):
        CheckpointReader(folder)


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-000003.safetensors", "model.safetensors.index.json"])
def test_pipes_and_devices_are_refused(folder: Path, name: str) -> None:
    """Reading one would wait for ever."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: is not a regular file"):
        CheckpointReader(folder)

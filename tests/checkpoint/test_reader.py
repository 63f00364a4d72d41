"""The reader: stored values as they are, damaged values never."""

import math
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
    for name in ("file", "nothing"):
        with pytest.raises(CheckpointError, match=f"{name}: no such folder"):
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


def test_side_files_behind_links_are_followed(folder: Path) -> None:
    (folder.parent / "blob").write_text("{{ messages }}")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(folder.parent / "blob")
    assert Path("chat_template.jinja") in CheckpointReader(folder).side_files()

"""Dequantization against plain float64 loops that decode every value from its bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvq.checkpoint.dequant import dequantize_block, dequantize_channel, dequantize_int4, load_weight
from kvq.checkpoint.formats import SourceFormat, detect_format
from kvq.checkpoint.packing import pack_int4
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CheckpointError
from tests.checkpoints import INT4_GROUP, edit_tensor, make_checkpoint, read_tensors, shard_of

EXPERT = "model.layers.1.mlp.experts.0.down_proj"
ATTENTION = "model.layers.1.self_attn.kv_a_proj_with_mqa"  # 40 rows: the last block of 32 is partial


def decode_fp8(code: int) -> float:
    """float8_e4m3fn by its definition."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 0:
        return float(sign * mantissa / 8 * 2.0**-6)
    return float(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def plain_fp8(weight_OI: Tensor, scale_PQ: Tensor, height: int, width: int) -> Tensor:
    codes, scales = weight_OI.view(torch.uint8).tolist(), scale_PQ.double().tolist()
    rows = [
        [decode_fp8(code) * scales[i // height][j // width] for j, code in enumerate(row)]
        for i, row in enumerate(codes)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def plain_int4(packed_OW: Tensor, scale_OG: Tensor, group_size: int) -> Tensor:
    words, scales = packed_OW.tolist(), scale_OG.double().tolist()
    rows = [
        [(((row[j // 8] >> 4 * (j % 8)) & 15) - 8) * scales[i][j // group_size] for j in range(8 * len(row))]
        for i, row in enumerate(words)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def random_fp8(rows: int, columns: int) -> Tensor:
    """Every finite code, in random order."""
    codes = torch.randint(0, 254, (rows, columns), generator=torch.Generator().manual_seed(rows))
    codes = codes + (codes >= 0x7F)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def random_scale(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) * 0.1 + 1e-4


def test_plain_decoder_knows_the_codes() -> None:
    golden = {0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0xB8: -1.0, 0x7E: 448.0}
    assert {code: decode_fp8(code) for code in golden} == golden


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [
        (40, 72, (32, 32)),
        (64, 64, (32, 32)),
        (33, 31, (32, 32)),
        (576, 96, (128, 128)),
        (192, 200, (128, 128)),
        (5, 7, (128, 128)),
        (40, 72, (16, 64)),
        (1, 1, (128, 128)),
    ],
)
def test_blocks_equal_the_plain_loop(rows: int, columns: int, block: tuple[int, int]) -> None:
    weight = random_fp8(rows, columns)
    scale = random_scale(-(-rows // block[0]), -(-columns // block[1]))
    found = dequantize_block(weight, scale, block)
    assert found.dtype == torch.float32 and found.shape == weight.shape
    torch.testing.assert_close(found.double(), plain_fp8(weight, scale, *block), rtol=2**-24, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flat", [False, True])
def test_channels_equal_the_plain_loop(dtype: torch.dtype, flat: bool) -> None:
    weight, scale = random_fp8(40, 72), random_scale(40, 1).to(dtype)
    found = dequantize_channel(weight, scale[:, 0] if flat else scale)
    torch.testing.assert_close(found.double(), plain_fp8(weight, scale, 1, 72), rtol=2**-24, atol=0)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_equals_the_plain_loop(group_size: int) -> None:
    codes = torch.randint(-8, 8, (24, 384), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    scale = random_scale(24, 384 // group_size).bfloat16()
    expected = plain_int4(pack_int4(codes), scale, group_size)
    assert torch.equal(dequantize_int4(codes, scale).double(), expected)  # 4 and 8 bits of mantissa: exact


# Through the reader.


def open_checkpoint(folder: Path) -> tuple[CheckpointReader, SourceFormat]:
    reader = CheckpointReader(folder)
    return reader, detect_format(reader.config, reader.index)


def refused(folder: Path, module: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_weight(*open_checkpoint(folder), module)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", ["kimi_k2", "glm_moe_dsa"])
def test_every_block_scaled_module(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, "fp8_block", block_size=(32, 32))
    tensors = read_tensors(folder)
    modules = [name.removesuffix(".weight_scale_inv") for name in tensors if name.endswith("_scale_inv")]
    for module in modules[::7] + [name for name in modules if name.endswith("kv_a_proj_with_mqa")]:
        weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale_inv"]
        found = load_weight(*open_checkpoint(folder), module)
        torch.testing.assert_close(found.double(), plain_fp8(weight, scale, 32, 32), rtol=2**-24, atol=0)


def test_channel_scaled_module(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm4_moe", "fp8_channel")
    tensors = read_tensors(folder)
    expected = plain_fp8(tensors[f"{EXPERT}.weight"], tensors[f"{EXPERT}.weight_scale"], 1, 64)
    found = load_weight(*open_checkpoint(folder), EXPERT)
    torch.testing.assert_close(found.double(), expected, rtol=2**-24, atol=0)


def test_int4_module(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k25", "int4")
    tensors, module = read_tensors(folder), f"language_model.{EXPERT}"
    expected = plain_int4(tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"], INT4_GROUP)
    assert torch.equal(load_weight(*open_checkpoint(folder), module).double(), expected)


@pytest.mark.parametrize(("source", "tolerance"), [("fp8_block", 0.05), ("fp8_channel", 0.05), ("int4", 0.15)])
def test_every_source_gives_the_same_model(tmp_path: Path, source: str, tolerance: float) -> None:
    plain = open_checkpoint(make_checkpoint(tmp_path / "bf16", "kimi_k2", "bf16"))
    stored = open_checkpoint(make_checkpoint(tmp_path / source, "kimi_k2", source, block_size=(32, 32)))
    for module in (EXPERT, ATTENTION, "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate", "lm_head"):
        exact, found = load_weight(*plain, module), load_weight(*stored, module)
        assert found.dtype == torch.float32
        assert float((found - exact).norm() / exact.norm()) < tolerance


def test_weight_and_scale_in_different_shards(tmp_path: Path) -> None:
    apart = make_checkpoint(tmp_path / "apart", "kimi_k2")
    together = make_checkpoint(tmp_path / "together", "kimi_k2", pairs_together=True)
    scales = [name for name in read_tensors(apart) if name.endswith("_scale_inv")]
    scale = next(name for name in scales if shard_of(apart, name) != shard_of(apart, name.removesuffix("_scale_inv")))
    module = scale.removesuffix(".weight_scale_inv")
    found = load_weight(*open_checkpoint(apart), module)
    assert torch.equal(found, load_weight(*open_checkpoint(together), module))


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize(("source", "suffix"), [("fp8_block", "weight_scale_inv"), ("int4", "weight_scale")])
def test_scale_that_is_not_positive(tmp_path: Path, source: str, suffix: str, value: float) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2", source)
    edit_tensor(folder, f"{EXPERT}.{suffix}", lambda scale: scale.index_fill(0, torch.tensor([0]), value))
    assert f"{EXPERT}.{suffix} holds a scale that is not positive" in refused(folder, EXPERT)


def test_product_that_overflows(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    edit_tensor(folder, f"{EXPERT}.weight_scale_inv", lambda scale: torch.full_like(scale, 1e38))
    assert f"tensor {EXPERT}.weight holds NaN or Inf" in refused(folder, EXPERT)


def cut_groups(scale: Tensor) -> Tensor:
    return scale[:, :1]


def cut_rows(scale: Tensor) -> Tensor:
    return scale[:-1]


def flatten(scale: Tensor) -> Tensor:
    return scale.reshape(-1)


@pytest.mark.parametrize("damage", [cut_groups, cut_rows, flatten, torch.Tensor.t])
def test_int4_scale_of_wrong_shape(tmp_path: Path, damage: object) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2", "int4")
    assert callable(damage)
    edit_tensor(folder, f"{EXPERT}.weight_scale", damage)
    assert "weight_packed [64, 8] and weight_scale" in refused(folder, EXPERT)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_int4_words_of_wrong_type(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2", "int4")
    edit_tensor(folder, f"{EXPERT}.weight_packed", lambda words: words.to(dtype))
    assert "disagree" in refused(folder, EXPERT)


def test_module_that_is_not_there(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "kimi_k2")
    assert "no tensor model.layers.9.x.weight" in refused(folder, "model.layers.9.x")

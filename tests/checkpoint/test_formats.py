"""Source formats: recognized from config and headers, or refused in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvq.checkpoint.formats import SourceFormat, detect_format, find_quantization_config
from kvq.checkpoint.header import TensorInfo
from kvq.checkpoint.index import CheckpointIndex
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CheckpointError
from tests.checkpoints import FAMILIES, make_checkpoint

Headers = dict[str, tuple[str, tuple[int, ...]]]

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
CHANNEL = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
BLOCK = {**CHANNEL, "strategy": "block", "block_structure": [128, 128]}
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}
PLAIN: Headers = {"a.weight": ("BF16", (4, 4))}


def compressed(*weights: Any, **more: Any) -> dict[str, Any]:
    groups = {f"group_{number}": {"targets": ["Linear"], "weights": one} for number, one in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


def detect(quantization: Any, headers: Headers | None = None) -> SourceFormat:
    tensors = {
        name: TensorInfo(name, dtype, shape, "model.safetensors", 0, 0)
        for name, (dtype, shape) in (PLAIN if headers is None else headers).items()
    }
    index = CheckpointIndex(Path("folder"), tensors, ("model.safetensors",))
    return detect_format({} if quantization is None else {"quantization_config": quantization}, index)


def refused(quantization: Any, headers: Headers | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        detect(quantization, headers)
    assert str(caught.value).startswith("folder")
    return str(caught.value)


EXPECTED = {
    "fp8_block": ("fp8-block", "weight_scale_inv", (128, 128), None),
    "fp8_channel": ("fp8-channel", "weight_scale", None, None),
    "int4": ("int4-packed", "weight_scale", None, 32),
    "bf16": ("bf16", None, None, None),
}


@pytest.mark.parametrize("source", EXPECTED)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_source_of_every_family_is_recognized(tmp_path: Path, family: str, source: str) -> None:
    reader = CheckpointReader(make_checkpoint(tmp_path, family, source))
    found = detect_format(reader.config, reader.index)
    assert (found.kind, found.scale_suffix, found.block, found.group_size) == EXPECTED[source]


def test_quantization_config_inside_text_config(tmp_path: Path) -> None:
    reader = CheckpointReader(make_checkpoint(tmp_path, "kimi_k25", "int4"))
    assert "quantization_config" not in reader.config
    assert any(name.startswith("language_model.model.layers.1.") for name in reader.index.tensors)
    assert find_quantization_config(reader.config) == reader.config["text_config"]["quantization_config"]


@pytest.mark.parametrize("config", [{}, {"text_config": None}, {"text_config": {}}, {"quantization_config": None}])
def test_no_quantization_config_means_bf16(config: dict[str, Any]) -> None:
    assert find_quantization_config(config) is None


def test_titles_say_what_the_user_has() -> None:
    assert detect(FP8).title == "FP8 in 128x128 blocks"
    assert detect(compressed(CHANNEL)).title == "FP8 per output channel"
    assert detect(compressed(INT4)).title == "INT4 in groups of 32"
    assert detect(None).title == "BF16"


def test_block_fp8_of_compressed_tensors_keeps_its_group() -> None:
    found = detect(compressed(BLOCK, ignore=["lm_head"]))
    assert (found.kind, found.scale_suffix, found.block) == ("fp8-block", "weight_scale", (128, 128))
    assert found.fp8_group == {"targets": ["Linear"], "weights": BLOCK} and found.ignore == ("lm_head",)


def test_what_kvq_itself_writes_is_int4_with_an_fp8_rest() -> None:
    found = detect(compressed(INT4, BLOCK))
    assert (found.kind, found.block, found.group_size) == ("int4-packed", (128, 128), 32)
    assert found.fp8_group == {"targets": ["Linear"], "weights": BLOCK}


def test_block_size_as_text() -> None:
    assert detect({**FP8, "weight_block_size": "64x128"}).block == (64, 128)


@pytest.mark.parametrize("method", ["mxfp4", "gptq", "awq", "modelopt", None, ["fp8"]])
def test_other_quant_methods_are_refused(method: Any) -> None:
    message = refused({"quant_method": method})
    assert f"quant_method {method!r} is not supported; kvq reads fp8" in message and "config.json" in message


@pytest.mark.parametrize("size", [None, [], [128], [128, 0], [128, -1], [128.0, 128], "128", "axb", 128, [1, 2, 3]])
def test_fp8_without_a_block_size_is_refused(size: Any) -> None:
    assert "FP8 without a usable block size" in refused({"quant_method": "fp8", "weight_block_size": size})
    assert "FP8 without a usable block size" in refused(compressed({**BLOCK, "block_structure": size}))


@pytest.mark.parametrize(
    "change",
    [{"symmetric": False}, {"symmetric": None}, {"strategy": "channel"}, {"group_size": None}, {"group_size": 0}],
)
def test_asymmetric_or_odd_int4_is_refused(change: dict[str, Any]) -> None:
    assert "only symmetric group-wise INT4 is supported" in refused(compressed({**INT4, **change}))


@pytest.mark.parametrize(
    "weights", [{**INT4, "num_bits": 8}, {**INT4, "type": "float"}, {**CHANNEL, "num_bits": 4}, None, {}]
)
def test_other_compressed_tensors_groups_are_refused(weights: Any) -> None:
    assert "are not supported; kvq reads one FP8 group" in refused(compressed(weights))


def test_two_fp8_groups_are_refused() -> None:
    assert "kvq reads one FP8 group" in refused(compressed(CHANNEL, BLOCK))


@pytest.mark.parametrize("strategy", ["tensor", "token", None])
def test_other_fp8_strategies_are_refused(strategy: Any) -> None:
    assert f"FP8 with strategy {strategy!r}" in refused(compressed({**CHANNEL, "strategy": strategy}))


@pytest.mark.parametrize("groups", [None, {}, [], "x", {"group_0": 3}, {"group_0": {"weights": [1]}}, {"a": None}])
def test_damaged_config_groups_are_refused(groups: Any) -> None:
    message = refused({"quant_method": "compressed-tensors", "config_groups": groups})
    assert "compressed-tensors without usable config_groups" in message


@pytest.mark.parametrize("ignore", ["lm_head", [1], {"a": 1}, ["re:("]])
@pytest.mark.parametrize(
    "make",
    [lambda ignore: compressed(CHANNEL, ignore=ignore), lambda ignore: {**FP8, "modules_to_not_convert": ignore}],
)
def test_damaged_ignore_list_is_refused(make: Callable[[Any], Any], ignore: Any) -> None:
    message = refused(make(ignore))
    assert "expected a list of names to ignore" in message or "no regular expression" in message


# What the headers hold must be what the config says.

BLOCKS: Headers = {"a.weight": ("F8_E4M3", (200, 300)), "a.weight_scale_inv": ("F32", (2, 3))}
CHANNELS: Headers = {"a.weight": ("F8_E4M3", (200, 300)), "a.weight_scale": ("BF16", (200, 1))}


def test_partial_blocks_have_a_scale_of_their_own() -> None:
    assert detect(FP8, BLOCKS).block == (128, 128)
    assert detect(FP8, {"a.weight": ("F8_E4M3", (576, 128)), "a.weight_scale_inv": ("F32", (5, 1))}).block


@pytest.mark.parametrize("shape", [(200, 1), (200,)])
def test_channel_scales_with_and_without_a_last_dimension(shape: tuple[int, ...]) -> None:
    assert detect(compressed(CHANNEL), {**CHANNELS, "a.weight_scale": ("BF16", shape)}).kind == "fp8-channel"


@pytest.mark.parametrize("shape", [(1, 3), (2, 2), (3, 2), (6,), (), (2, 3, 1), (200, 1)])
def test_block_scale_of_wrong_shape(shape: tuple[int, ...]) -> None:
    message = refused(FP8, {**BLOCKS, "a.weight_scale_inv": ("F32", shape)})
    assert f"a.weight_scale_inv is F32 {list(shape)}, expected a float tensor [2, 3] for a.weight" in message


@pytest.mark.parametrize("shape", [(1, 200), (199, 1), (), (1,), (200, 3)])
def test_channel_scale_of_wrong_shape(shape: tuple[int, ...]) -> None:
    message = refused(compressed(CHANNEL), {**CHANNELS, "a.weight_scale": ("BF16", shape)})
    assert "expected a float tensor [200, 1] for a.weight" in message


@pytest.mark.parametrize("dtype", ["I32", "F64", "I8"])
def test_scale_of_wrong_dtype(dtype: str) -> None:
    assert f"is {dtype} [2, 3], expected a float" in refused(FP8, {**BLOCKS, "a.weight_scale_inv": (dtype, (2, 3))})


def test_fp8_tensor_without_scale() -> None:
    message = refused(FP8, {"a.weight": ("F8_E4M3", (200, 300)), "b.weight_scale_inv": ("F32", (2, 3))})
    assert "model.safetensors: FP8 tensor a.weight has no scale a.weight_scale_inv" in message
    assert "has no scale a.weight_scale_inv" in refused(FP8, CHANNELS)


def test_fp8_tensor_that_no_config_explains() -> None:
    assert "a.weight is F8_E4M3 [200, 300], which the config does not explain" in refused(None, BLOCKS)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [("a.weight", "F8_E5M2", (4, 4)), ("a.weight", "F8_E4M3", (4,)), ("a.b", "F8_E4M3", (4, 4))],
)
def test_fp8_of_other_kinds(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    headers: Headers = {name: (dtype, shape), "a.weight_scale_inv": ("F32", (1, 1))}
    assert f"{name} is {dtype} {list(shape)}, which the config does not explain" in refused(FP8, headers)


@pytest.mark.parametrize("quantization", [None, FP8, compressed(INT4)])
@pytest.mark.parametrize("dtype", ["U8", "F4", "F8_E8M0"])
def test_mxfp4_is_refused(quantization: Any, dtype: str) -> None:
    message = refused(quantization, {"a.weight_packed": (dtype, (4, 4))})
    assert f"a.weight_packed is {dtype}: MXFP4/NVFP4 and other packed formats are not supported" in message


@pytest.mark.parametrize("quantization", [None, FP8, compressed(CHANNEL)])
@pytest.mark.parametrize("dtype", ["I8", "I32", "F64", "BOOL"])
def test_weights_of_odd_types_are_refused(quantization: Any, dtype: str) -> None:
    assert f"a.weight is {dtype}, expected BF16, F16, F32" in refused(quantization, {"a.weight": (dtype, (4, 4))})


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_plain_weights_may_be_any_float(dtype: str) -> None:
    headers: Headers = {"a.weight": (dtype, (4, 4)), "a.position_ids": ("I64", (4,))}
    assert detect(None, headers).kind == "bf16"

"""TP x EP that kvq refuses, and those that it calls workable, against what SGLang makes of them.

A size is unusable where SGLang refuses to make the model or to load it, where a GPU's weights, read back through their
scales, are other numbers than its share of the checkpoint, and where a kernel's own rule turns down the shapes. kvq
must refuse exactly these.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from kvq.checkpoint.dequant import dequantize_block, dequantize_channel, dequantize_int4
from kvq.checkpoint.packing import unpack_int4
from kvq.publish.parallel import TRITON_INT4_GROUPS
from tests.contract import engine
from tests.contract.expected import Expected
from tests.contract.test_loading import read_tensors

BLOCK = (128, 128)
REFUSALS = (AssertionError, ValueError, RuntimeError)


def cuts() -> list[dict[str, Any]]:
    rows = json.loads((engine.CASES / "cuts.json").read_text(encoding="utf-8"))
    return [{**row, "size": size} for row in rows for size in row["sizes"]]


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's weights in float32, under the names of unquantized ones."""
    plain = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        scale = tensors.get(f"{module}.weight_scale")
        if part == "weight_packed" and scale is not None:
            plain[f"{module}.weight"] = dequantize_int4(unpack_int4(tensor, tensor.shape[1] * 8), scale)
        elif part == "weight" and scale is not None:
            plain[name] = _fp8(tensor, scale)
        elif part not in ("weight_scale", "weight_shape"):
            plain[name] = tensor.float()
    return plain


def _fp8(weight_OI: Tensor, scale: Tensor) -> Tensor:
    by_row = scale.shape[1] == 1 and scale.shape[0] == weight_OI.shape[0]
    return dequantize_channel(weight_OI, scale) if by_row else dequantize_block(weight_OI, scale, BLOCK)


def held(model: nn.Module, name: str, group: int) -> tuple[str, Tensor] | None:
    """A parameter of the engine in float32, under the name of an unquantized one; None for what is read with it."""
    value, start = model.get_parameter(name).data, name.removesuffix("_packed")
    if name.endswith("weight_packed"):  # [E, K, N]
        words = value.transpose(1, 2).contiguous()
        codes = unpack_int4(words.flatten(0, 1), words.shape[2] * 8).view(*words.shape[:2], -1).transpose(1, 2)
        scale = model.get_parameter(f"{start}_scale").data.float().repeat_interleave(group, dim=1)
        fits = scale.shape == codes.shape  # a slice that is no whole groups has too few scales
        return start, codes.float() * scale if fits else torch.empty(0)
    if name.endswith(("weight_scale", "weight_shape", "g_idx", "sort_indices")):
        return None
    if value.dtype == torch.float8_e4m3fn:
        return name, _fp8(value, model.get_parameter(f"{name}_scale").data)
    return name, value.float()


def misplaced(row: dict[str, Any], model: nn.Module, expected: Expected) -> str | None:
    for name, _ in model.named_parameters():
        found = held(model, name, row["group"])
        wanted = None if found is None else expected.of(found[0])
        if found is None or wanted is None:
            continue
        if not torch.equal(found[1], wanted.float()):
            return f"{name} holds other numbers"
    return None


def turned_down(model: nn.Module, group: int) -> str | None:
    """By the rules that SGLang's kernels have, which it asks at the first request at the earliest."""
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers.quantization.marlin_utils import check_moe_marlin_supports_layer

    fp8_kernel._per_token_group_quant_8bit = MagicMock()  # past its rules, the function starts this kernel
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dtype == torch.float8_e4m3fn:
            try:
                fp8_kernel.per_token_group_quant_fp8(torch.zeros(1, weight.shape[1]), BLOCK[1])
            except AssertionError:
                return f"{name}: an input of {weight.shape[1]} is no whole blocks"
        if hasattr(module, "w13_weight_packed") and not check_moe_marlin_supports_layer(module, group):
            if group not in TRITON_INT4_GROUPS:  # compressed_tensors.py: get_moe_scheme
                return f"{name}: neither Marlin nor Triton"
    return None


def verdict(row: dict[str, Any], tp: int, ep: int) -> str | None:
    """Why SGLang could not serve this size; None where it could. Runs in a child of its own."""
    folder, rank = Path(row["folder"]), tp - 1
    tensors = read_tensors(folder)
    try:
        model = engine.build_model(folder, rank, tp, ep)
        engine.load(model, iter(tensors.items()))
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    expected = Expected(dequantized(tensors), row["text_config"], rank, tp, ep)
    return misplaced(row, model, expected) or turned_down(model, row["group"])


@pytest.mark.parametrize("row", cuts(), ids=lambda row: f"{row['name']}-tp{row['size'][0]}-ep{row['size'][1]}")
def test_kvq_refuses_what_the_engine_cannot_serve(row: dict[str, Any]) -> None:
    tp, ep, problems = row["size"]
    found = engine.in_child(lambda: verdict(row, tp, ep))
    assert bool(problems) == bool(found), f"kvq says {problems}, SGLang {found}"

"""Every quantization_config through SGLang's own scheme selection, for every module of the plan by SGLang's names."""

import json
import re
from typing import Any

import pytest
from torch import nn

from tests.contract import engine

FUSED = {
    "q_a_proj": "fused_qkv_a_proj_with_mqa", "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa", "q_proj": "qkv_proj",
    "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "wk": "wk_weights_proj", "weights_proj": "wk_weights_proj",
}  # fmt: skip
# Plain nn modules in SGLang, or taken from the target: no scheme is asked for.
UNASKED = (".mlp.gate", ".eh_proj", ".shared_head.head")


class ColumnParallelLinear(nn.Module):
    """Stands for a linear layer: the selection looks at the name of its class."""


class FusedMoE(nn.Module):
    """Stands for a layer of experts."""


def published() -> list[dict[str, Any]]:
    path = engine.CASES / "schemes.json"
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def engine_name(module: str, row: dict[str, Any]) -> str:
    """As SGLang calls the module: fused, without the prefix of a multimodal model, the draft layer as a decoder."""
    module = module.removeprefix(row["prefix"])
    module = re.sub(rf"^model\.layers\.{row['layers']}\.", "model.decoder.", module)
    start, _, last = module.rpartition(".")
    return f"{start}.{FUSED.get(last, last)}" if start else module


def select(row: dict[str, Any]) -> dict[str, str]:
    """Module -> the scheme that SGLang would give it."""
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a8_fp8

    compressed_tensors.get_moe_runner_backend = lambda: MoeRunnerBackend.MARLIN
    compressed_tensors_w8a8_fp8.dispatch_w8a8_block_fp8_linear = lambda *_, **__: None
    config = compressed_tensors.CompressedTensorsConfig.from_config(row["quantization_config"])
    config.packed_modules_mapping = {"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]}
    found = {}
    for module, kind in row["modules"].items():
        name = engine_name(module, row)
        if name.endswith(UNASKED):
            continue
        if kind == "int4":
            scheme = config.get_moe_scheme(FusedMoE(), name.rpartition(".experts.")[0] + ".experts")
        else:
            scheme = config.get_linear_scheme(ColumnParallelLinear(), name)
        found[module] = type(scheme).__name__
    assert list(config.weight_block_size or []) == (row["block"] or [])
    return found


WANTED = {"int4": "CompressedTensorsWNA16MoE", "fp8": "CompressedTensorsW8A8Fp8", "plain": "NoneType"}


@pytest.mark.parametrize("row", published(), ids=lambda row: row["name"])
def test_every_module_gets_the_planned_scheme(row: dict[str, Any]) -> None:
    found = engine.in_child(lambda: select(row))
    assert len(found) > 100
    assert found == {module: WANTED[row["modules"][module]] for module in found}

"""The whole model at once, for checkpoints that fit: what streaming is compared with, and what can generate text."""

from typing import Any

from torch import Tensor, nn

from kvq.calibration import transformers_door
from kvq.calibration.forward import ModelRunner

FUSED = {"mlp.experts.gate_up_proj": "expert_gate_up", "mlp.experts.down_proj": "expert_down"}


def load_whole_model(runner: ModelRunner) -> Any:
    """transformers' own model, every weight dequantized by kvq, on the runner's device in its computing type.

    Works for all formats that kvq reads; transformers itself fails on FP8 matrices whose rows its blocks do not divide.
    Raises CheckpointError for a tensor that is missing.
    """
    model = transformers_door.build_model(runner.facts.arch, runner.config)
    state = {name: _value(runner, name) for name in model.state_dict()}
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = transformers_door.build_rotary(runner.facts.arch, runner.config, runner.device)
    model.requires_grad_(False)
    _assert_filled(model)
    return model


def _value(runner: ModelRunner, name: str) -> Tensor:
    if name == "lm_head.weight":
        return runner.lm_head()
    layer = runner.facts.layer_of(runner.facts.arch.prefix + name)
    below = name.split(".", 3)[-1]
    if layer is not None and below in FUSED:
        stacked: Tensor = getattr(runner, FUSED[below])(layer, range(runner.facts.num_experts))
        return stacked
    return runner.weight(runner.facts.arch.prefix + name)


def _assert_filled(model: nn.Module) -> None:
    left = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    assert not left, f"not filled: {left[:3]}"

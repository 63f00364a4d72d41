"""The one way to a decoder layer with all of its experts: for evaluation, KV statistics and the choice of KV scales."""

from typing import Any

from torch import nn

from kvq.calibration.experts import RoutedExperts
from kvq.calibration.forward import ModelRunner
from kvq.calibration.kv_hook import KvHook, install_kv_hook


def whole_layer(runner: ModelRunner, layer: int, kv_hook: KvHook | None = None) -> Any:
    """The layer's weights and those of all its experts at once, on the runner's device; frees with what is returned.

    `kv_hook` sees, and may replace, what attention would cache. Raises CheckpointError for damaged or absent weights.
    """
    experts: nn.Module = nn.Identity()
    if layer in runner.facts.moe_layers:
        everyone = range(runner.facts.num_experts)
        experts = RoutedExperts(runner.expert_gate_up(layer, everyone), runner.expert_down(layer, everyone))
    module = runner.build_layer(layer, experts)
    if kv_hook is not None:
        install_kv_hook(module.self_attn, runner.facts.arch.attention, layer, kv_hook)
    return module

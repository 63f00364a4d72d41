"""Statistics of what an engine would keep in its KV cache, gathered while the model runs over the calibration tokens.

Shape suffixes: N = sequences, S = tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvq.calibration.activations import ActivationStore
from kvq.calibration.experts import RoutedExperts
from kvq.calibration.forward import ModelRunner
from kvq.calibration.kv_hook import install_kv_hook
from kvq.calibration.kv_stats import KvStatistics


def whole_layer(runner: ModelRunner, layer: int) -> Any:
    """A decoder layer with all its experts, as it runs in evaluation."""
    experts: nn.Module = nn.Identity()
    if layer in runner.facts.moe_layers:
        everyone = range(runner.facts.num_experts)
        experts = RoutedExperts(runner.expert_gate_up(layer, everyone), runner.expert_down(layer, everyone))
    return runner.build_layer(layer, experts)


def gather_statistics(runner: ModelRunner, tokens_NS: Tensor, stage: Callable[[str], None]) -> KvStatistics:
    """One pass of the whole model over the tokens, layer by layer, an MTP layer included.

    Raises CalibrationError when a layer's output is not finite.
    """
    statistics = KvStatistics(runner.facts.arch.attention)
    store: ActivationStore = runner.embed(tokens_NS)
    total = runner.facts.num_layers + runner.facts.num_mtp_layers
    for layer in range(total):
        stage(f"layer {layer + 1}/{total}")
        if layer in runner.facts.mtp_layers:
            if tokens_NS.shape[1] < 2:
                break
            store = runner.mtp_input(layer, tokens_NS, store)
        module = whole_layer(runner, layer)
        install_kv_hook(module.self_attn, statistics.attention, layer, statistics.observe)
        with torch.no_grad():
            runner.run(module, layer, store)
        runner.reader.release()
    return statistics

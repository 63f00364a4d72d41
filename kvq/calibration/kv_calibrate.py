"""Statistics of what an engine would keep in its KV cache, gathered while the model runs over the calibration tokens.

Shape suffixes: B = sequences, N = all sequences, S = tokens, H = hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kvq.calibration.activations import ActivationStore
from kvq.calibration.experts import RoutedExperts
from kvq.calibration.forward import ModelRunner
from kvq.calibration.kv_hook import KvHook, install_kv_hook
from kvq.calibration.kv_stats import KvStatistics


def watch_layer(runner: ModelRunner, module: Any, layer: int, hook: KvHook) -> None:
    """Let `hook` see every stored tensor of a decoder layer when it runs, the indexer's key for any sequence length.

    Call it before `runner.run`, which replaces an indexer that has no choice: its key is worked out beside it then.
    """
    attention = runner.facts.arch.attention
    install_kv_hook(module.self_attn, attention, layer, hook)
    if attention == "dsa" and module.self_attn.indexer is not None:
        _watch_indexer(module.self_attn, runner.config, layer, hook)


def _watch_indexer(self_attn: Any, config: Any, layer: int, hook: KvHook) -> None:
    indexer = self_attn.indexer

    def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_BSH = args[0] if args else kwargs["hidden_states"]
        if hidden_BSH.shape[1] > config.index_topk:
            return  # the indexer itself runs, and its cache is hooked
        unread = hidden_BSH.new_zeros(*hidden_BSH.shape[:2], config.q_lora_rank)
        caught = _CaughtKey()
        try:
            indexer(hidden_BSH, unread, kwargs["position_embeddings"], kwargs["attention_mask"], None, caught)
        except _KeyIsHereError:
            hook(layer, "index_key", caught.key)

    self_attn.register_forward_pre_hook(look, with_kwargs=True)


class _KeyIsHereError(Exception):
    """Ends the indexer's forward where its key is done: the scores, of every token with every other, are not needed."""


class _CaughtKey:
    """Stands where transformers' cache would."""

    key: Tensor

    def update_indexer(self, key: Tensor, *_: object) -> Tensor:
        self.key = key
        raise _KeyIsHereError


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
        watch_layer(runner, module, layer, statistics.observe)
        with torch.no_grad():
            runner.run(module, layer, store)
        runner.reader.release()
    return statistics

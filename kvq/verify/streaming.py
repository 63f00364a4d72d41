"""Two models on the same tokens, a decoder layer of each at a time.

Shape suffixes: N = sequences, S = tokens, H = hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.activations import ActivationStore
from kvq.calibration.forward import ModelRunner
from kvq.calibration.whole_layer import whole_layer
from kvq.verify.damage import LayerDamage
from kvq.verify.kv_simulation import KvSimulation

Stage = Callable[[str], None]


@dataclass(eq=False)
class StreamedModel:
    """A model whose layers are built, run and dropped one by one; `kv` is what its attention reads through."""

    runner: ModelRunner
    stores: list[ActivationStore]
    kv: KvSimulation | None = None

    @classmethod
    def begin(cls, runner: ModelRunner, groups: Sequence[Tensor], kv: KvSimulation | None = None) -> "StreamedModel":
        """Embed all groups of token sequences [N, S]."""
        return cls(runner, [runner.embed(tokens_NS) for tokens_NS in groups], kv)

    def build(self, layer: int) -> Any:
        """The layer with all of its experts, its attention reading through `kv`."""
        return whole_layer(self.runner, layer, self.kv)

    def step(self, module: Any, layer: int) -> None:
        """Run the layer on all groups, and let its bytes go."""
        for store in self.stores:
            self.runner.run(module, layer, store)
        self.runner.reader.release()

    def finish(self) -> list[Tensor]:
        """Hidden states of every group after the final norm [N, S, H], on the host."""
        norm = self.runner.final_norm()
        with torch.no_grad():
            for store in self.stores:
                for batch in store.batches():
                    store.write(batch, norm(store.read(batch, self.runner.device)))
                store.land()
        return [store.state()["hidden_NSH"] for store in self.stores]


def final_hidden(
    runner: ModelRunner, groups: Sequence[Tensor], stage: Stage, kv: KvSimulation | None = None
) -> list[Tensor]:
    """Hidden states of one model after the final norm for every group of token sequences [N, S], on the host."""
    model = StreamedModel.begin(runner, groups, kv)
    for layer in range(runner.facts.num_layers):
        stage(f"layer {layer + 1}/{runner.facts.num_layers}")
        model.step(model.build(layer), layer)
    return model.finish()


def run_both(base: StreamedModel, other: StreamedModel, damage: list[LayerDamage] | None, stage: Stage) -> None:
    """Both models through all layers, the base first in each. The layers' records go into `damage` if it is a list."""
    count = base.runner.facts.num_layers
    for layer in range(count):
        stage(f"layer {layer + 1}/{count}")
        if damage is None:
            for model in (base, other):
                model.step(model.build(layer), layer)
        else:
            damage.append(_run_watched(base, other, layer))


def _run_watched(base: StreamedModel, other: StreamedModel, layer: int) -> LayerDamage:
    """One layer of both in memory. The other's also runs on the base's input, of which two copies are held."""
    facts = base.runner.facts
    record = LayerDamage(layer, facts.num_experts)
    base_module, other_module = base.build(layer), other.build(layer)
    routed = layer in facts.moe_layers
    if routed:
        record.watch_experts(base_module.mlp.experts, other_module.mlp.experts)
    inputs, probes = ([store.copy() for store in base.stores] for _ in range(2))
    base.step(base_module, layer)
    del base_module
    watching = record.own_choices.watch(other_module.mlp.experts) if routed else None
    if other.kv is not None:
        other.kv.counting = False
    for stores in zip(inputs, probes, base.stores, strict=True):
        other.runner.run(other_module, layer, stores[1], _compare_own(record, *stores, other.runner.device))
        for store in stores:
            store.land()
    if watching is not None:
        watching.remove()
        record.other_choices.watch(other_module.mlp.experts)
    if other.kv is not None:
        other.kv.counting = True
    other.step(other_module, layer)
    for ours, theirs in zip(base.stores, other.stores, strict=True):
        for batch in ours.batches():
            record.accumulated.add(ours.read(batch, base.runner.device), theirs.read(batch, base.runner.device))
        ours.land()
        theirs.land()
    record.close()
    return record


def _compare_own(
    record: LayerDamage, before: ActivationStore, probe: ActivationStore, store: ActivationStore, device: torch.device
) -> Callable[[slice], None]:
    """When a batch of the probe is done: what both layers added to the same hidden states."""

    def compare(batch: slice) -> None:
        before_BSH = before.read(batch, device)
        record.own.add(store.read(batch, device) - before_BSH, probe.read(batch, device) - before_BSH)

    return compare

"""Where the distance between two checkpoints comes from: by layer, router and expert.

Three ways of looking at a layer:

    own            both layers on the source's input: what this layer alone does wrong
    accumulated    each model on its own input: what has come together up to here
    expert         both experts on the tokens that the source's router sends to the source's expert

Errors are relative: the root of sum |difference|^2 / sum |source|^2 over tokens and channels. A layer's own error is
taken of what it adds to the hidden states, as the sum that it adds to would hide it.

Shape suffixes: B = sequences of a batch, S = tokens, H = hidden size, E = experts, T = tokens, K = experts per token.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from kvq.calibration.experts import RoutedExperts

WORST_LAYERS = 5
WORST_EXPERTS = 20


@dataclass(slots=True, eq=False)
class Difference:
    """Relative error and mean cosine over tokens, summed up batch by batch."""

    error_energy: float = 0.0
    energy: float = 0.0
    cosine_sum: float = 0.0
    tokens: int = 0

    def add(self, reference_BSH: Tensor, other_BSH: Tensor) -> None:
        reference, other = reference_BSH.double(), other_BSH.double()
        self.error_energy += float((other - reference).square().sum())
        self.energy += float(reference.square().sum())
        self.cosine_sum += float(F.cosine_similarity(reference, other, dim=-1).sum())
        self.tokens += reference[..., 0].numel()

    @property
    def relative_error(self) -> float:
        if self.energy == 0:
            return 0.0 if self.error_energy == 0 else math.inf
        return math.sqrt(self.error_energy / self.energy)

    @property
    def cosine(self) -> float:
        """1 exactly where nothing differs, whatever the rounding of the norms."""
        return 1.0 if self.error_energy == 0 else self.cosine_sum / self.tokens


class RouterChoices:
    """The experts that a router chose, batch by batch, kept on the host."""

    def __init__(self) -> None:
        self.expert_TK: list[Tensor] = []

    def watch(self, experts: RoutedExperts) -> RemovableHandle:
        return experts.register_forward_pre_hook(lambda _module, inputs: self.expert_TK.append(inputs[1].short().cpu()))

    def chosen(self, num_experts: int) -> Tensor:
        """Whether each token went to each expert [T, E]."""
        expert_TK = torch.cat(self.expert_TK).long()
        return torch.zeros(expert_TK.shape[0], num_experts, dtype=torch.bool).scatter_(1, expert_TK, True)


@dataclass(eq=False)
class LayerDamage:
    """Everything measured about one layer. Only MoE layers have routers and experts."""

    layer: int
    num_experts: int
    own: Difference = field(default_factory=Difference)
    accumulated: Difference = field(default_factory=Difference)
    source_choices: RouterChoices = field(default_factory=RouterChoices)
    own_choices: RouterChoices = field(default_factory=RouterChoices)
    other_choices: RouterChoices = field(default_factory=RouterChoices)
    expert_rows: list[dict[str, Any]] = field(default_factory=list)
    router_row: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._error_E = [torch.zeros(()) for _ in range(self.num_experts)]
        self._energy_E = [torch.zeros(()) for _ in range(self.num_experts)]

    def watch_experts(self, source: RoutedExperts, other: RoutedExperts) -> None:
        """Compare every expert of `other` on the tokens that `source` runs its own for."""

        def observe(expert: int, x_TH: Tensor, weight_T1: Tensor, added_TH: Tensor) -> None:
            difference_TH = other.weighted_output(expert, x_TH, weight_T1).double() - added_TH.double()
            self._error_E[expert] = self._error_E[expert] + difference_TH.square().sum().cpu()
            self._energy_E[expert] = self._energy_E[expert] + added_TH.double().square().sum().cpu()

        source.observe = observe
        self.source_choices.watch(source)

    def close(self) -> None:
        """Turn what was collected into rows, and drop it."""
        if not self.source_choices.expert_TK:
            return
        source, own, other = (
            choices.chosen(self.num_experts) for choices in (self.source_choices, self.own_choices, self.other_choices)
        )
        per_token = self.source_choices.expert_TK[0].shape[1]
        self.router_row = {
            "router_agreement": _share((source & own).sum(), source.shape[0] * per_token),
            "router_agreement_accumulated": _share((source & other).sum(), source.shape[0] * per_token),
        }
        total = sum(float(energy) for energy in self._energy_E)
        for expert in range(self.num_experts):
            error, energy = float(self._error_E[expert]), float(self._energy_E[expert])
            self.expert_rows.append({
                "layer": self.layer, "expert": expert, "tokens": int(source[:, expert].sum()),
                "relative_error": math.sqrt(error / energy) if energy else None,
                "weighted_error": math.sqrt(error / total) if total else 0.0,
                "routing_changes": _share((source[:, expert] ^ own[:, expert]).sum(), source.shape[0]),
            })  # fmt: skip
        for choices in (self.source_choices, self.own_choices, self.other_choices):
            choices.expert_TK.clear()

    def row(self) -> dict[str, Any]:
        """The layer as plain data; router figures are None for a dense layer."""
        router = self.router_row or dict.fromkeys(("router_agreement", "router_agreement_accumulated"))
        return {
            "layer": self.layer, "own_error": self.own.relative_error, "own_cosine": self.own.cosine,
            "accumulated_error": self.accumulated.relative_error, "accumulated_cosine": self.accumulated.cosine,
            **router,
        }  # fmt: skip


def _share(part: Tensor, whole: int) -> float:
    return float(part) / whole


def damage_report(layers: list[LayerDamage]) -> dict[str, Any]:
    """All rows, and the worst of each kind, worst first. `weighted_error` orders experts: their error relative to all
    that the layer's experts add, so that an expert that few tokens meet counts little."""
    layer_rows = [layer.row() for layer in layers]
    expert_rows = [row for layer in layers for row in layer.expert_rows]
    routed = [row for row in layer_rows if row["router_agreement"] is not None]
    by_error = sorted(layer_rows, key=lambda row: (-row["own_error"], row["layer"]))
    by_router = sorted(routed, key=lambda row: (row["router_agreement"], row["layer"]))
    by_expert = sorted(expert_rows, key=lambda row: (-row["weighted_error"], row["layer"], row["expert"]))
    by_change = sorted(expert_rows, key=lambda row: (-row["routing_changes"], row["layer"], row["expert"]))
    changed = [row for row in by_change if row["routing_changes"] > 0]
    return {
        "layers": layer_rows,
        "experts": expert_rows,
        "worst": {
            "layers": [row for row in by_error[:WORST_LAYERS] if row["own_error"] > 0],
            "routers": [row for row in by_router[:WORST_LAYERS] if row["router_agreement"] < 1],
            "routed_experts": changed[:WORST_EXPERTS],
            "experts": [row for row in by_expert[:WORST_EXPERTS] if row["weighted_error"] > 0],
        },
    }

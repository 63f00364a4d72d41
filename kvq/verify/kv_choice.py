"""Which FP8 KV scales are better, measured: the model runs over held-out tokens with its cache in BF16 and, beside it,
once for every set of scales, each layer's weights read once for all of them.

KL is that of the model with its own unquantized cache to the same model with the quantized one, at every position.

Shape suffixes: D = documents of one length, S = tokens, P = positions, H = hidden size, V = vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvq.calibration.activations import ActivationStore
from kvq.calibration.e4m3 import E4M3_MAX, through_e4m3
from kvq.calibration.forward import ModelRunner
from kvq.calibration.kv_stats import SCALE_PARTS
from kvq.calibration.whole_layer import whole_layer
from kvq.verify.documents import by_length
from kvq.verify.kv_simulation import StoredTensor
from kvq.verify.logits import position_rows

PLAIN = "bf16"
ONE = "one"  # every scale 1.0: what engines do without scales
SIGNIFICANT = 2.0  # standard errors by which calibrated scales must win over 1.0

LayerScales = Mapping[int, Mapping[str, float]]


@dataclass(eq=False)
class KvComparison:
    """`kl_P` and `next_P` (log p of the next token, NaN at a document's end) by set of scales; `errors` by layer,
    stored tensor and set."""

    kl_P: dict[str, Tensor]
    next_P: dict[str, Tensor]
    errors: dict[int, dict[str, dict[str, StoredTensor]]]
    document_lengths: list[int]

    def as_dict(self) -> dict[str, Any]:
        """Mean KL with its standard error, perplexities over the same positions, and the row for each layer."""
        count = self.kl_P[ONE].numel()
        return {
            "num_documents": len(self.document_lengths),
            "num_positions": count,
            "perplexity": {name: math.exp(-float(p[~p.isnan()].mean())) for name, p in self.next_P.items()},
            "mean_kl": {name: float(kl.mean()) for name, kl in self.kl_P.items()},
            "mean_kl_error": {name: self._error(kl) for name, kl in self.kl_P.items()},
            "max_kl": {name: float(kl.max()) for name, kl in self.kl_P.items()},
            "layers": {
                str(layer): {
                    tensor: {name: error.shares() for name, error in sets.items()} for tensor, sets in tensors.items()
                }
                for layer, tensors in sorted(self.errors.items())
            },
        }

    def choose(self) -> tuple[str, str]:
        """The set to serve with, and why. Calibrated scales are taken when their KL is lower than that of 1.0 by more
        than two standard errors of the difference at the same positions; 1.0 needs nothing of an engine."""
        calibrated = [name for name in self.kl_P if name != ONE]
        best = min(calibrated, key=lambda name: float(self.kl_P[name].mean()))
        gain_P = self.kl_P[ONE] - self.kl_P[best]
        gain, error = float(gain_P.mean()), self._error(gain_P)
        figures = (
            f"mean KL to the unquantized cache {float(self.kl_P[ONE].mean()):.3g} at 1.0, "
            f"{float(self.kl_P[best].mean()):.3g} at {best}; difference {gain:.2g} +/- {error:.2g}"
        )
        if gain > SIGNIFICANT * error and gain > 0:
            return best, f"{figures}: calibrated scales are better"
        return ONE, f"{figures}: calibrated scales are not better than 1.0"

    def _error(self, value_P: Tensor) -> float:
        """Standard error of the mean from the documents' sums: positions of one document are not independent."""
        count, total = len(self.document_lengths), value_P.numel()
        if count < 2:
            return math.inf if count else 0.0
        mean = value_P.mean()
        residuals = torch.stack([part.sum() - mean * len(part) for part in torch.split(value_P, self.document_lengths)])
        return float(residuals.square().sum().sqrt()) / total * math.sqrt(count / (count - 1))


@dataclass(eq=False)
class _Storage:
    """The hook: replaces what is stored under the set at work, and counts errors while none is (on the same true
    values for every set)."""

    sets: Mapping[str, LayerScales]
    parts: Mapping[str, str]
    at_work: str = PLAIN
    errors: dict[int, dict[str, dict[str, StoredTensor]]] = field(default_factory=dict)

    def __call__(self, layer: int, name: str, x: Tensor) -> Tensor:
        if name not in self.parts:
            return x  # the indexer's key: engines scale it dynamically
        if self.at_work == PLAIN:
            rows = self.errors.setdefault(layer, {}).setdefault(name, {})
            for set_name in self.sets:
                scale = self._scale(set_name, layer, name)
                rows.setdefault(set_name, StoredTensor()).add(x.float(), through_e4m3(x, scale), E4M3_MAX * scale)
            return x
        return through_e4m3(x, self._scale(self.at_work, layer, name)).to(x.dtype)

    def _scale(self, set_name: str, layer: int, name: str) -> float:
        return self.sets[set_name][layer][self.parts[name]]


def compare_scales(
    runner: ModelRunner, documents: Sequence[Tensor], sets: Mapping[str, LayerScales], stage: Callable[[str], None]
) -> KvComparison:
    """Run all sets over the documents. `sets` must hold `one`, and for each decoder layer both scales."""
    groups = [group.tokens_NS for group in by_length(documents)]
    names = (PLAIN, *sets)
    stores = {name: [runner.embed(tokens_DS) for tokens_DS in groups] for name in names}
    by_scale = SCALE_PARTS[runner.facts.arch.attention]
    storage = _Storage(sets, {part: name for name in reversed(list(by_scale)) for part in by_scale[name]})
    for layer in range(runner.facts.num_layers):
        stage(f"layer {layer + 1}/{runner.facts.num_layers}")
        module = whole_layer(runner, layer, storage)
        for name in names:
            storage.at_work = name
            for store in stores[name]:
                runner.run(module, layer, store)
        runner.reader.release()
    stage("comparing")
    kl: dict[str, list[Tensor]] = {name: [] for name in sets}
    next_p: dict[str, list[Tensor]] = {name: [] for name in names}
    norm, head_VH = runner.final_norm(), runner.lm_head()
    for number, tokens_DS in enumerate(groups):
        for document in range(tokens_DS.shape[0]):
            log_p = {name: _log_p(runner, stores[name][number], document, norm, head_VH) for name in names}
            _compare(log_p, tokens_DS[document], kl, next_p)
    joined_kl, joined_next = ({name: torch.cat(parts) for name, parts in kept.items()} for kept in (kl, next_p))
    lengths = [tokens_DS.shape[1] for tokens_DS in groups for _ in range(tokens_DS.shape[0])]
    return KvComparison(joined_kl, joined_next, storage.errors, lengths)


def _log_p(runner: ModelRunner, store: ActivationStore, document: int, norm: Any, head_VH: Tensor) -> Tensor:
    """[S, V] of one document."""
    with torch.no_grad():
        hidden_SH = norm(store.read(slice(document, document + 1), runner.device))[0]
        store.land()
        return F.log_softmax(F.linear(hidden_SH, head_VH).float(), dim=-1)


def _compare(
    log_p: Mapping[str, Tensor], tokens_S: Tensor, kl: dict[str, list[Tensor]], next_p: dict[str, list[Tensor]]
) -> None:
    base_PV = log_p[PLAIN]
    next_P = F.pad(tokens_S[1:], (0, 1), value=-1).to(base_PV.device)
    for name, other_PV in log_p.items():
        kl_P, _, _, other_P = position_rows(base_PV, other_PV, next_P)
        next_p[name].append(other_P.cpu())
        if name != PLAIN:
            kl[name].append(kl_P.cpu())

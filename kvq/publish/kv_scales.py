"""`kv_cache_scales.json` and `kvq-reports/kv.json`: calibrated scales, which were chosen, what engines do with them.

docs/kv-scales.md documents both files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvq import __version__
from kvq.calibration.dataset import TokenSet
from kvq.calibration.e4m3 import E4M3_MAX
from kvq.calibration.kv_stats import PERCENTILE, VARIANTS, KvStatistics
from kvq.checkpoint.architecture import ModelFacts
from kvq.errors import CalibrationError
from kvq.publish.manifest import printable
from kvq.publish.serving_files import SERVING_FOLDER
from kvq.verify.kv_choice import ONE, KvComparison, LayerScales
from kvq.verify.kv_delivery import SCALE_NAMES, Target, deliveries

SCALES_FILE = f"{SERVING_FOLDER}/kv_cache_scales.json"
SCHEMA = "kvq.kv-scales/1"
DTYPE = "fp8_e4m3"
# Without held-out data: share by which the error on the calibration tokens must fall for calibrated scales to be taken.
WORTHWHILE = 0.05


@dataclass(frozen=True, slots=True)
class ChosenScales:
    """Scales by layer under every variant, and the one to serve with."""

    sets: Mapping[str, LayerScales]
    chosen: str
    why: str

    @property
    def scales(self) -> LayerScales:
        return self.sets[self.chosen]


def scale_sets(statistics: KvStatistics) -> dict[str, dict[int, dict[str, float]]]:
    """Every variant, and 1.0, for each layer that saw data."""
    sets: dict[str, dict[int, dict[str, float]]] = {
        ONE: {layer: dict.fromkeys(SCALE_NAMES, 1.0) for layer in statistics.layers}
    }
    for variant in VARIANTS:
        sets[variant] = {
            layer: {name: statistics.scale(layer, name, variant) for name in SCALE_NAMES} for layer in statistics.layers
        }
    return sets


def choose_scales(statistics: KvStatistics, comparison: KvComparison | None) -> ChosenScales:
    """By KL on held-out tokens where it was measured, else by the rounding error on the calibration tokens."""
    sets = scale_sets(statistics)
    if comparison is not None:
        return ChosenScales(sets, *comparison.choose())
    error = {name: _mean_error(statistics, scales) for name, scales in sets.items()}
    best = min(VARIANTS, key=lambda name: error[name])
    figures = f"mean relative error on the calibration tokens {error[ONE]:.3g} at 1.0, {error[best]:.3g} at {best}"
    if error[best] < (1 - WORTHWHILE) * error[ONE]:
        return ChosenScales(sets, best, f"{figures}: calibrated scales are better (no held-out data was given)")
    return ChosenScales(sets, ONE, f"{figures}: calibrated scales are not better than 1.0 (no held-out data was given)")


def _mean_error(statistics: KvStatistics, scales: LayerScales) -> float:
    errors = [
        statistics.part(layer, name).relative_error(row[name]) for layer, row in scales.items() for name in SCALE_NAMES
    ]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def scales_file(facts: ModelFacts, choice: ChosenScales, tokens: TokenSet) -> dict[str, Any]:
    """The content of `kv_cache_scales.json`. Raises CalibrationError rather than write a scale that cannot be right."""
    layers = {}
    for layer, row in sorted(choice.scales.items()):
        variants = {name: dict(scales[layer]) for name, scales in choice.sets.items() if name != ONE}
        for name, scale in [*row.items(), *(item for variant in variants.values() for item in variant.items())]:
            if not 0 < scale < math.inf:
                raise CalibrationError(f"layer {layer}: {name} came out as {scale}; this is a fault of kvq, report it.")
        layers[str(layer)] = {**row, "variants": variants}
    every = range(facts.num_layers + facts.num_mtp_layers)
    return {
        "schema": SCHEMA, "kvq_version": __version__, "model_type": facts.arch.model_type,
        "attention": facts.arch.attention, "num_layers": facts.num_layers, "num_mtp_layers": facts.num_mtp_layers,
        "dtype": DTYPE, "stored": "x / scale", "max_value": E4M3_MAX, "granularity": "tensor",
        "chosen": choice.chosen, "why": choice.why, "percentile": PERCENTILE, "calibration": calibration_of(tokens),
        "layers": layers, "not_calibrated": [layer for layer in every if str(layer) not in layers],
    }  # fmt: skip


def calibration_of(tokens: TokenSet) -> dict[str, Any]:
    return {
        "name": printable(tokens.title), "sha256": tokens.sha256, "num_tokens": tokens.num_tokens,
        "num_sequences": tokens.tokens_NS.shape[0], "sequence_length": tokens.tokens_NS.shape[1],
    }  # fmt: skip


def kv_report(
    facts: ModelFacts, statistics: KvStatistics, choice: ChosenScales, comparison: KvComparison | None, target: Target
) -> dict[str, Any]:
    """`kv.json`: statistics, errors, the decision, and for each group of layers what every engine does."""
    return {
        "attention": facts.arch.attention, "dtype": DTYPE, "target": target,
        "chosen": choice.chosen, "why": choice.why,
        "calibration_tokens": {
            str(layer): {name: _statistics_row(statistics, layer, name, choice) for name in SCALE_NAMES}
            for layer in statistics.layers
        },
        "stored_tensors": {
            str(layer): {name: {"amax": stats.amax, "amax_per_head": stats.amax_N.tolist()}
                         for name, stats in sorted(tensors.items())}
            for layer, tensors in sorted(statistics.tensors.items())
        },
        "held_out": None if comparison is None else comparison.as_dict(),
        "delivery": delivery_rows(facts, target),
    }  # fmt: skip


def _statistics_row(statistics: KvStatistics, layer: int, name: str, choice: ChosenScales) -> dict[str, Any]:
    part = statistics.part(layer, name)
    rows = {
        variant: {
            "scale": scales[layer][name],
            "relative_error": part.relative_error(scales[layer][name]),
            "saturated_share": part.share_above(E4M3_MAX * scales[layer][name]),
            "underflow_share": part.share_lost(scales[layer][name]),
        }
        for variant, scales in choice.sets.items()
    }
    return {"amax": part.amax, f"p{PERCENTILE:g}": part.percentile(PERCENTILE), "variants": rows}


def delivery_rows(facts: ModelFacts, target: Target) -> list[dict[str, Any]]:
    """For each group of layers: what each version of the target does with static scales."""
    groups = [("decoder layers", range(facts.num_layers)), ("MTP layers", facts.mtp_layers)]
    rows = []
    for row in deliveries(target, facts.arch.attention):
        for title, layers in groups:
            if not layers:
                continue
            unknown = title == "MTP layers" and row.verdict == "used"
            rows.append({
                "layers": f"{title} {layers.start}-{layers.stop - 1}", "engine": row.engine,
                "verdict": "withheld" if unknown else row.verdict,
                "reason": "what it does for a draft model is not known" if unknown else row.reason,
                "sentence": f"withheld: not known for the draft model of {row.engine}" if unknown else row.sentence(),
                "divides_on_write": row.divides_on_write, "multiplies_on_read": row.multiplies_on_read,
                "source": row.source,
            })  # fmt: skip
    return rows

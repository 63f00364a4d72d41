"""Figures over positions, under llama.cpp's names (`llama-perplexity --kl-divergence`), each with its standard error.

`error` takes positions as independent, as llama.cpp does. Positions of one text are not, so `document_error` is given
too: the same with whole documents as the units that were drawn (the cluster-robust error of a mean).

The error of a percentile is half the distance between the order statistics one binomial standard deviation below and
above it, which assumes nothing about the distribution. Maxima and minima have none.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.verify.logits import Positions

Array = NDArray[np.float64]

KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)
DELTA_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its standard errors; None where one is not defined."""

    value: float
    error: float | None = None
    document_error: float | None = None

    def times(self, factor: float) -> "Estimate":
        scaled = [None if error is None else error * abs(factor) for error in (self.error, self.document_error)]
        return Estimate(self.value * factor, *scaled)

    def __str__(self) -> str:
        return f"{self.value:.6g}" if self.error is None else f"{self.value:.6g} +/- {self.error:.2g}"


@dataclass(frozen=True, slots=True)
class Figures:
    """KL in nats; probabilities and shares between 0 and 1. `num_predicted` positions have a token that follows.

    What needs such a token is None where no position has one.
    """

    num_documents: int
    num_positions: int
    num_predicted: int
    mean_kld: Estimate
    max_kld: Estimate
    min_kld: Estimate
    percentile_kld: dict[str, Estimate]
    same_top_p: Estimate
    mean_ppl_q: Estimate | None
    mean_ppl_base: Estimate | None
    ppl_ratio: Estimate | None
    ppl_difference: Estimate | None
    ln_ppl_ratio: Estimate | None
    cor_ln_ppl: float | None
    mean_delta_p: Estimate | None
    rms_delta_p: Estimate | None
    max_delta_p: Estimate | None
    min_delta_p: Estimate | None
    percentile_delta_p: dict[str, Estimate] | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(positions: Positions) -> Figures:
    """All figures of at least one position."""
    kl, same = _array(positions.kl_P), _array(positions.same_P)
    document = positions.document_P.numpy()
    known = ~np.isnan(_array(positions.base_P))
    return Figures(
        num_documents=len(np.unique(document)),
        num_positions=len(kl),
        num_predicted=int(known.sum()),
        mean_kld=mean(kl, document),
        max_kld=Estimate(float(kl.max())),
        min_kld=Estimate(float(kl.min())),
        percentile_kld=percentiles(kl, KLD_PERCENTILES),
        same_top_p=mean(same, document),  # its error is llama.cpp's sqrt(p (1 - p) / (n - 1))
        **_token_figures(_array(positions.base_P)[known], _array(positions.other_P)[known], document[known]),
    )


def _token_figures(base: Array, other: Array, document: NDArray[np.int64]) -> dict[str, Any]:
    """Perplexities and delta p, from log p of the tokens that follow."""
    names = (
        "mean_ppl_q", "mean_ppl_base", "ppl_ratio", "ppl_difference", "ln_ppl_ratio", "cor_ln_ppl", "mean_delta_p",
        "rms_delta_p", "max_delta_p", "min_delta_p", "percentile_delta_p",
    )  # fmt: skip
    if len(base) == 0:
        return dict.fromkeys(names)
    ln_q, ln_base, ln_ratio = mean(-other, document), mean(-base, document), mean(base - other, document)
    ppl_q, ppl_base, ratio = math.exp(ln_q.value), math.exp(ln_base.value), math.exp(ln_ratio.value)
    delta = np.exp(other) - np.exp(base)
    square = mean(delta**2, document)
    rms = math.sqrt(square.value)
    # d PPL = PPL d ln PPL, position by position, so that what both models share cancels in the difference.
    difference = mean(ppl_q * -other - ppl_base * -base, document)
    values = (
        _scaled_errors(ppl_q, ln_q, ppl_q), _scaled_errors(ppl_base, ln_base, ppl_base),
        _scaled_errors(ratio, ln_ratio, ratio), _scaled_errors(ppl_q - ppl_base, difference, 1.0), ln_ratio,
        _correlation(other, base), mean(delta, document), _scaled_errors(rms, square, 0.5 / rms if rms else 0.0),
        Estimate(float(delta.max())), Estimate(float(delta.min())), percentiles(delta, DELTA_PERCENTILES),
    )  # fmt: skip
    return dict(zip(names, values, strict=True))


def mean(values: Array, document: NDArray[np.int64]) -> Estimate:
    """The mean; std / sqrt(n); and the root of the sum over documents of (sum of deviations)^2, over n, times
    sqrt(D / (D - 1)) for D documents."""
    count, middle = len(values), float(values.mean())
    error = float(values.std(ddof=1) / math.sqrt(count)) if count > 1 else None
    _, place = np.unique(document, return_inverse=True)
    sums = np.bincount(place, weights=values - middle)
    groups = len(sums)
    clustered = math.sqrt(groups / (groups - 1) * float((sums**2).sum())) / count if groups > 1 else None
    return Estimate(middle, error, clustered)


def _scaled_errors(value: float, of: Estimate, slope: float) -> Estimate:
    """A function of an estimate, with errors to first order."""
    return Estimate(value, of.times(slope).error, of.times(slope).document_error)


def _correlation(left: Array, right: Array) -> float | None:
    if len(left) < 2 or left.std() == 0 or right.std() == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])


def percentiles(values: Array, wanted: tuple[float, ...]) -> dict[str, Estimate]:
    """Linear between order statistics, like llama.cpp's."""
    ordered = np.sort(values)
    found = np.quantile(ordered, [p / 100 for p in wanted])
    return {
        f"{p:g}": Estimate(float(value), _order_error(ordered, p / 100)) for p, value in zip(wanted, found, strict=True)
    }


def _order_error(ordered: Array, p: float) -> float | None:
    count = len(ordered)
    if count < 2:
        return None
    spread = math.sqrt(count * p * (1 - p))
    low, high = math.floor(count * p - spread), math.ceil(count * p + spread)
    return float(ordered[min(max(high, 0), count - 1)] - ordered[min(max(low, 0), count - 1)]) / 2


def _array(values: Any) -> Array:
    result: Array = values.double().numpy()
    return result


def by_position(positions: Positions) -> list[dict[str, Any]]:
    """Figures of positions with 0, 1, 2-3, 4-7, 8-15, ... tokens before them: does the error grow with the context?"""
    places = positions.place_P.numpy()
    rows, start, stop = [], 0, 1
    while start <= places.max():
        inside = (places >= start) & (places < stop)
        if inside.any():
            part = positions.pick(positions.kl_P.new_tensor(inside).bool())
            found = summarize(part)
            rows.append({
                "from": start, "to": stop - 1, "num_positions": found.num_positions,
                "mean_kld": asdict(found.mean_kld), "same_top_p": asdict(found.same_top_p),
                "rms_delta_p": asdict(found.rms_delta_p) if found.rms_delta_p is not None else None,
            })  # fmt: skip
        start, stop = stop, stop * 2
    return rows

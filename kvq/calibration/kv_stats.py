"""What is seen of the tensors that an engine keeps in its KV cache, and the FP8 scales that follow from it.

Streamed: the true maximum over all tokens (no moving average), a count of every value in fixed bins, nothing else.
Everything merges exactly, in any order: maxima by max, counts by addition.

The bins are those of a float32's own exponent and its first five fraction bits: 32 equal parts of every power of two.
A bin's upper edge is at most 1/32 above any value in it, bins are the same on every device, and 448 is an edge.

Shape suffixes: B = sequences, N = heads (1 where all heads share one latent), S = tokens, D = width, K = bins,
C = candidate scales, P = points inside the bins.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.e4m3 import E4M3_MAX, through_e4m3
from kvq.checkpoint.architecture import Attention
from kvq.errors import CalibrationError
from kvq.ranks import Ranks

FRACTION_BITS = 5
NUM_BINS = 256 << FRACTION_BITS
POINTS = 4  # per bin: 64 to 128 for each step between neighbouring FP8 values of a power of two
PERCENTILE = 99.99
STEPS_PER_OCTAVE = 8
SHRINK_OCTAVES, GROW_OCTAVES = 4, 1

# Which stored tensors share which scale. MLA keeps latent and rotated key in one row, under one scale.
SCALE_PARTS: Mapping[Attention, Mapping[str, tuple[str, ...]]] = {
    "gqa": {"k_scale": ("key",), "v_scale": ("value",)},
    "mla": {"k_scale": ("latent", "k_pe"), "v_scale": ("latent", "k_pe")},
    "dsa": {"k_scale": ("latent", "k_pe"), "v_scale": ("latent", "k_pe")},
}
VARIANTS = ("amax", "percentile", "min_error")


@dataclass(eq=False)
class TensorStats:
    """Statistics of one stored tensor of one layer. `count_K` sums to the number of values seen."""

    amax_N: Tensor
    count_K: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "TensorStats":
        """Of one batch: [B, N, S, D], or [B, S, D] for a tensor that all heads share."""
        magnitude = x.detach().float().abs()
        amax_N = magnitude.amax(dim=(0, 2, 3)) if x.dim() == 4 else magnitude.amax().reshape(1)
        bins = magnitude.view(torch.int32) >> (23 - FRACTION_BITS)
        return cls(amax_N, torch.bincount(bins.reshape(-1), minlength=NUM_BINS))

    def add(self, other: "TensorStats") -> None:
        """Take in statistics of other tokens: of a batch, a rank, or a run that was stopped."""
        if other.amax_N.shape == self.amax_N.shape:
            self.amax_N = torch.maximum(self.amax_N, other.amax_N)
        else:  # tensors of one scale, with and without heads
            self.amax_N = torch.maximum(self.amax_N.max(), other.amax_N.max()).reshape(1)
        self.count_K = self.count_K + other.count_K

    @property
    def amax(self) -> float:
        return float(self.amax_N.max())

    @property
    def num_values(self) -> int:
        return int(self.count_K.sum())

    def percentile(self, percent: float) -> float:
        """Upper edge of the bin that the percentile falls into, and never more than the maximum."""
        below_K = torch.cumsum(self.count_K, 0).double()
        reached = int(torch.searchsorted(below_K, below_K[-1] * (percent / 100)))
        return min(float(_edges()[reached + 1]), self.amax)

    def share_above(self, limit: float) -> float:
        """Share of values whose magnitude is above a limit; exact when the limit is a bin's edge."""
        return self._share(lambda points_P: points_P > limit)

    def share_lost(self, scale: float) -> float:
        """Share of values that are not zero but become zero at this scale: below half of the smallest FP8 step."""
        smallest = 2.0**-9 * scale / 2
        return self._share(lambda points_P: (points_P > 0) & (points_P < smallest))

    def _share(self, chosen: Any) -> float:
        points_P, weight_P = self._points()
        total = float(self.count_K.sum())
        return float(weight_P[chosen(points_P)].sum()) / total if total else 0.0

    def relative_error(self, scale: float) -> float:
        """Root of (sum of squared FP8 rounding errors / sum of squares) at a scale, from the counts.

        Values are taken to lie evenly within their bin.
        """
        points_P, weight_P = self._points()
        power = float((weight_P * points_P.square()).sum())
        return (float(_squared_error(points_P, weight_P, scale)) / power) ** 0.5 if power else 0.0

    def min_error_scale(self) -> float:
        """The candidate with the least squared error: eight an octave, from amax / 448 / 16 to twice amax / 448."""
        base = self.amax / E4M3_MAX
        steps = range(-SHRINK_OCTAVES * STEPS_PER_OCTAVE, GROW_OCTAVES * STEPS_PER_OCTAVE + 1)
        candidates = [base * math.exp2(step / STEPS_PER_OCTAVE) for step in steps]
        points_P, weight_P = self._points()
        errors = [float(_squared_error(points_P, weight_P, scale)) for scale in candidates]
        return candidates[errors.index(min(errors))]

    def _points(self) -> tuple[Tensor, Tensor]:
        """Magnitudes inside the bins that hold something, and how many values each stands for."""
        count_K = self.count_K.cpu()
        used = torch.nonzero(count_K).squeeze(-1)
        low_K, high_K = _edges()[used], _edges()[used + 1]
        inside_P = (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS
        points_KP = low_K[:, None] + (high_K - low_K)[:, None] * inside_P
        points_KP[used == 0] = 0.0
        weight_KP = (count_K[used].double() / POINTS)[:, None].expand(-1, POINTS)
        return points_KP.clamp(max=self.amax).reshape(-1), weight_KP.reshape(-1)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able and exact: `bins` maps a bin's number to its count."""
        counts = self.count_K.tolist()
        return {"amax": self.amax_N.tolist(), "bins": {str(i): count for i, count in enumerate(counts) if count}}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "TensorStats":
        count_K = torch.zeros(NUM_BINS, dtype=torch.int64)
        for number, count in value["bins"].items():
            count_K[int(number)] = count
        return cls(torch.tensor(value["amax"], dtype=torch.float32), count_K)


def _edges() -> Tensor:
    """Lower edges of all bins and the upper edge of the last, as float64."""
    bits = torch.arange(NUM_BINS + 1, dtype=torch.int64) << (23 - FRACTION_BITS)
    return bits.clamp(max=0x7F7FFFFF).to(torch.int32).view(torch.float32).double()


def _squared_error(points_P: Tensor, weight_P: Tensor, scale: float) -> Tensor:
    return (weight_P * (points_P - through_e4m3(points_P, scale)).square()).sum()


class KvStatistics:
    """Statistics by layer and stored tensor. `observe` is a hook: it looks at a tensor and gives it back as it is."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.tensors: dict[int, dict[str, TensorStats]] = {}

    def observe(self, layer: int, name: str, x: Tensor) -> Tensor:
        self._add(layer, name, TensorStats.of(x))
        return x

    def of_all(self, ranks: Ranks) -> "KvStatistics":
        """What the sequences of all ranks showed; the same on every rank."""
        whole = KvStatistics(self.attention)
        for part in ranks.gather(self.as_dict(self.layers)):
            whole.load(part)
        return whole

    def _add(self, layer: int, name: str, stats: TensorStats) -> None:
        known = self.tensors.setdefault(layer, {})
        if name in known:
            known[name].add(stats)
        else:
            known[name] = TensorStats(stats.amax_N, stats.count_K)

    @property
    def layers(self) -> list[int]:
        return sorted(self.tensors)

    def part(self, layer: int, scale_name: str) -> TensorStats:
        """What shares a scale, as one. Raises CalibrationError for a layer or a part that saw no data, and for values
        that are not finite: no scale is ever made up."""
        parts = SCALE_PARTS[self.attention][scale_name]
        missing = [name for name in parts if name not in self.tensors.get(layer, {})]
        if missing:
            raise CalibrationError(
                f"layer {layer} saw no {missing[0]} during calibration, so it has no {scale_name}. Calibrate it, or "
                "leave it at the engine's default of 1.0."
            )
        joined = TensorStats(self.tensors[layer][parts[0]].amax_N, self.tensors[layer][parts[0]].count_K)
        for name in parts[1:]:
            joined.add(self.tensors[layer][name])
        if not 0 < joined.amax < float("inf"):  # NaN fails too
            raise CalibrationError(
                f"layer {layer}: the largest {' or '.join(parts)} is {joined.amax}; a scale cannot be made of it. Look "
                "at the source's weights (`kvq verify`) and at the calibration data."
            )
        return joined

    def scale(self, layer: int, scale_name: str, variant: str) -> float:
        """A scale by which an engine divides what it stores: positive and finite, as float32 holds it."""
        part = self.part(layer, scale_name)
        exact = {
            "amax": lambda: part.amax / E4M3_MAX,
            "percentile": lambda: part.percentile(PERCENTILE) / E4M3_MAX,
            "min_error": part.min_error_scale,
        }[variant]()
        return max(float(torch.tensor(exact, dtype=torch.float32)), float(torch.finfo(torch.float32).tiny))

    def as_dict(self, layers: Iterable[int]) -> dict[str, Any]:
        """JSON-able and exact, of the given layers as far as they saw data."""
        return {
            str(layer): {name: stats.as_dict() for name, stats in self.tensors.get(layer, {}).items()}
            for layer in layers
        }

    def load(self, value: Mapping[str, Any]) -> None:
        """Take in what `as_dict` gave."""
        for layer, tensors in value.items():
            for name, stats in tensors.items():
                self._add(int(layer), name, TensorStats.from_dict(stats))

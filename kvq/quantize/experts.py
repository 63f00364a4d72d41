"""One layer's routed experts: statistics from their own tokens, solving, packing, and their output for the next layer.

The order saves memory and passes over the data: gate and up of all experts first; then down, whose input is what the
*quantized* gate and up give; then the output, for which a float32 row per token is held beside the solved weights, when
the statistics are gone. Of a whole layer only the small down Hessians and the solved weights are held at once.

Shape suffixes: T = tokens, H = hidden size, I = expert width, J = 2 I (gate rows, then up rows), E = experts of a
chunk, O, C = rows and columns of a projection.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvq.calibration.experts import gated_activation
from kvq.calibration.stats import cross_gram, gram
from kvq.quantize.ahead import LoadingAhead
from kvq.quantize.awq import search_smoothing
from kvq.quantize.capture import Capture
from kvq.quantize.chunks import KEPT_BYTES, num_kept
from kvq.quantize.drift import corrected_weight
from kvq.quantize.kept import kept_weight
from kvq.quantize.moments import borrowed_share, borrowed_tokens, expert_moments
from kvq.quantize.pack import HostBlocks, pack_batch
from kvq.quantize.qparams import from_codes
from kvq.quantize.solvers import SOLVERS
from kvq.quantize.types import ModuleResult, Outcome, SolvedBatch, SolverBatch
from kvq.recipes.schema import Recipe

GATE_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)
# Of all rows, an error would need a product with H as large as a refinement pass's.
REPORT_ROWS = 512


class ExpertSource(Protocol):
    """Where an expert's weights come from, dequantized."""

    def expert_gate_up(self, layer: int, experts: range) -> Tensor: ...

    def expert_down(self, layer: int, experts: range) -> Tensor: ...

    def read_ahead(self, layer: int, experts: range, projections: Sequence[str]) -> None: ...


@dataclass(slots=True, eq=False)
class SolvedLayer:
    """Packed tensors by name, a result per matrix, and the experts' summed output per token (None without data)."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    results: list[ModuleResult] = field(default_factory=list)
    output_TH: Tensor | None = None


@dataclass(slots=True, eq=False)
class LayerSolver:
    """Solves the experts of one layer. Those of a chunk are solved together; `module_name(expert, projection)` gives
    the names to write."""

    source: ExpertSource
    recipe: Recipe
    layer: int
    num_experts: int
    chunks: Sequence[range]
    module_name: Callable[[int, str], str]
    device: torch.device
    capture: Capture | None
    progress: Callable[[str], None]
    _solved: SolvedLayer = field(default_factory=SolvedLayer)
    _host: HostBlocks = field(default_factory=HostBlocks)
    _noted: list[Callable[[], list[ModuleResult]]] = field(default_factory=list)
    _gate_up: dict[int, Callable[[], Tensor]] = field(default_factory=dict)
    _down: dict[int, Callable[[], Tensor]] = field(default_factory=dict)
    _hidden: dict[int, Tensor] = field(default_factory=dict)
    _num_kept: int = 0
    _down_sums: dict[int, Tensor] = field(default_factory=dict)
    _drift_sums: dict[int, Tensor] = field(default_factory=dict)
    _smoothing: dict[int, Tensor] = field(default_factory=dict)

    def solve(self) -> SolvedLayer:
        with torch.no_grad(), LoadingAhead(self.device) as ahead:
            self._solve_all_gate_up(ahead)
            self._solve_all_down(ahead)
            if self.capture is not None:
                self._solved.output_TH = self._output(self.capture)
        noted, self._noted = self._noted, []  # they hold this solver, and it the layer's tokens
        for results in noted:
            self._solved.results += results()
        return self._solved

    def _solve_all_gate_up(self, ahead: LoadingAhead) -> None:
        layer_mean = None if self.capture is None else self.capture.layer_mean()
        for experts, weights in self._loaded(ahead, GATE_UP, self.source.expert_gate_up, DOWN):
            self.progress(f"gate/up {experts.stop}/{self.num_experts}")
            self._solve_gate_up(experts, weights(), layer_mean)

    def _solve_all_down(self, ahead: LoadingAhead) -> None:
        down_mean = self._pooled_down()
        for experts, weights in self._loaded(ahead, DOWN, self.source.expert_down, ()):
            self.progress(f"down {experts.stop}/{self.num_experts}")
            self._solve_down(experts, weights(), down_mean)

    def _loaded(
        self, ahead: LoadingAhead, projections: Sequence[str], load: Callable[[int, range], Tensor],
        afterwards: Sequence[str],
    ) -> Iterator[tuple[range, Callable[[], Tensor]]]:  # fmt: skip
        """Each chunk, and what gives its weights. Those of the next one are under way then; after the last chunk the
        first of the projections that come afterwards are read from the disk."""
        following = ahead.begin(partial(load, self.layer, self.chunks[0]))
        for number, experts in enumerate(self.chunks):
            weights = following
            if number + 1 < len(self.chunks):
                self.source.read_ahead(self.layer, self.chunks[number + 1], projections)
                following = ahead.begin(partial(load, self.layer, self.chunks[number + 1]))
            elif afterwards:
                self.source.read_ahead(self.layer, self.chunks[0], afterwards)
            yield experts, weights

    def _tokens(self, experts: range) -> Callable[[], Iterable[Tensor]]:
        """Gives the tokens of each expert, as often as it is asked. They are held where gathering them takes an
        exchange, and on a GPU, which has room for a chunk's; on a CPU they would be the peak of small models."""
        capture = self.capture
        if capture is None:
            return tuple
        if self.device.type == "cpu" and capture.ranks.size == 1:
            return lambda: capture.tokens(experts)
        held = list(capture.tokens(experts))
        return lambda: held

    def _counts(self, experts: range) -> list[int]:
        assert self.capture is not None
        return [self.capture.count(expert) for expert in experts]

    def _solve_gate_up(self, experts: range, weight_EJH: Tensor, layer_mean_HH: Tensor | None) -> None:
        half = weight_EJH.shape[1] // 2
        if self.capture is not None and experts == self.chunks[0]:
            bytes_per_token = half * self.capture.x_TH.element_size()
            self._num_kept = num_kept(self.capture.most_tokens(), bytes_per_token, KEPT_BYTES[self.device.type])
        tokens = self._tokens(experts)
        if self.recipe.solver == "awq" and self.capture is not None:
            weight_EJH = self._smoothed(experts, weight_EJH, tokens())
        moments = None
        if layer_mean_HH is not None:
            sums = map(gram, tokens())
            moments = expert_moments(sums, self._counts(experts), layer_mean_HH, borrowed_tokens(self.recipe, False))
        batch = SolverBatch(weight_EJH.float(), moments)
        solved = solve_batch(batch, self.recipe)
        self._record(experts, batch, solved, {"gate_proj": slice(0, half), "up_proj": slice(half, None)})
        if self.capture is None:
            return
        for expert, tokens_TH in zip(experts, tokens(), strict=True):
            index = expert - experts.start
            self._gate_up[expert] = self._used(weight_EJH, solved, index)
            hidden_TI = gated_activation(tokens_TH, self._gate_up[expert]())
            if self.capture.own.index(expert) < self._num_kept:
                self._hidden[expert] = hidden_TI
            self._down_sums[expert] = gram(hidden_TI)
            if self._corrects_drift:
                drift_TI = gated_activation(tokens_TH, weight_EJH[index]) - hidden_TI
                self._drift_sums[expert] = cross_gram(drift_TI, hidden_TI)

    @property
    def _corrects_drift(self) -> bool:
        return self.capture is not None and self.recipe.drift_correction and self.recipe.propagate_error

    def _used(self, weight_EOC: Tensor, solved: SolvedBatch, index: int) -> Callable[[], Tensor]:
        """Gives the weights that later statistics and the output see: as written, or the source's."""
        if not self.recipe.propagate_error:
            return lambda: weight_EOC[index]
        return kept_weight(solved, index, weight_EOC.dtype)

    def _smoothed(self, experts: range, weight_EJH: Tensor, tokens: Iterable[Tensor]) -> Tensor:
        """Rows of up divided by the factors that down's columns will be multiplied by."""
        sums = [
            gram(gated_activation(tokens_TH, weight_JH))
            for tokens_TH, weight_JH in zip(tokens, weight_EJH, strict=True)
        ]
        own = [total / max(1, count) for total, count in zip(sums, self._counts(experts), strict=True)]
        down_EHI = self.source.expert_down(self.layer, experts).float()
        factor_EI = search_smoothing(down_EHI, torch.stack(own), self.recipe.group_size)
        self._smoothing.update(zip(experts, factor_EI, strict=True))
        gate_EIH, up_EIH = weight_EJH.chunk(2, dim=1)
        return torch.cat([gate_EIH, up_EIH / factor_EI.to(up_EIH.dtype).unsqueeze(-1)], dim=1)

    def _pooled_down(self) -> Tensor | None:
        """Mean second moment of down's inputs over all experts' tokens."""
        if self.capture is None:
            return None
        total = self.capture.ranks.total(torch.stack(list(self._down_sums.values())).sum(dim=0))
        return total / max(1, self.capture.num_rows)

    def _solve_down(self, experts: range, weight_EHI: Tensor, down_mean_II: Tensor | None) -> None:
        if self._smoothing:
            factor_EI = torch.stack([self._smoothing.pop(expert) for expert in experts])
            weight_EHI = weight_EHI * factor_EI.to(weight_EHI.dtype).unsqueeze(1)
        batch = original = SolverBatch(weight_EHI.float(), None)
        if down_mean_II is not None:
            borrowed, counts = borrowed_tokens(self.recipe, True), self._counts(experts)
            sums = [self._down_sums.pop(expert) for expert in experts]
            moments = expert_moments(sums, counts, down_mean_II, borrowed)
            batch = original = SolverBatch(original.weight_EOI, moments)
            if self._corrects_drift:
                drifts = [self._drift_sums.pop(expert) for expert in experts]
                shares = [drift / max(1.0, n + borrowed) for drift, n in zip(drifts, counts, strict=True)]
                corrected = corrected_weight(batch.weight_EOI, torch.stack(shares), moments, counts, self.recipe)
                batch = SolverBatch(corrected, moments)
        solved = solve_batch(batch, self.recipe)
        self._record(experts, original, solved, {"down_proj": slice(None)})
        if self.capture is not None:
            self._down.update((expert, self._used(weight_EHI, solved, expert - experts.start)) for expert in experts)

    def _output(self, capture: Capture) -> Tensor:
        """Of all experts, for the tokens of this rank: float32 [T, H]."""
        output_TH = torch.zeros_like(capture.x_TH, dtype=torch.float32)
        ends = {experts.start: experts.stop for experts in self.chunks}

        def output_of(expert: int, tokens_TH: Tensor | None) -> Tensor:
            if expert in ends:  # not for each expert: progress may be written to a slow disk
                self.progress(f"output {ends[expert]}/{self.num_experts}")
            gate_up, down = self._gate_up.pop(expert), self._down.pop(expert)
            hidden_TI = self._hidden.pop(expert) if tokens_TH is None else gated_activation(tokens_TH, gate_up())
            return F.linear(hidden_TI, down())

        capture.add_outputs(output_TH, capture.own, output_of, self._num_kept)
        return output_TH

    def _record(self, experts: range, batch: SolverBatch, solved: SolvedBatch, rows: dict[str, slice]) -> None:
        """Pack each projection and note its errors, without waiting for a GPU."""
        delta_EOC = from_codes(solved.codes_EOI, solved.scale_EOG) - batch.weight_EOI
        step = report_step([part.indices(delta_EOC.shape[1]) for part in rows.values()])
        moments = [None] if batch.hessian_EII is None else [None, batch.hessian_EII]
        values = [value[:, ::step] for value in (delta_EOC, batch.weight_EOI)]
        energies = [_row_energy(value, moment) for moment in moments for value in values]
        packed = pack_batch(solved.codes_EOI, solved.scale_EOG, self._host)
        for index, expert in enumerate(experts):
            for projection, part in rows.items():
                self._solved.tensors |= packed.module(self.module_name(expert, projection), index, part)
        dampening = None if batch.hessian_EII is None else solved.dampening
        sampled = {
            projection: slice(part.start and part.start // step, part.stop and part.stop // step)
            for projection, part in rows.items()
        }
        self._noted.append(partial(self._results, experts, torch.stack(energies), solved.outcomes, dampening, sampled))

    def _results(
        self, experts: range, energies: Tensor, outcomes: Sequence[Outcome], dampening: Sequence[float] | None,
        rows: dict[str, slice],
    ) -> list[ModuleResult]:  # fmt: skip
        """Of a chunk. `energies` are those of errors and of weights by row, plain and, with data, under the moment."""
        errors, found = energies.cpu(), []
        borrowed = borrowed_tokens(self.recipe, "down_proj" in rows)
        for index, expert in enumerate(experts):
            tokens = None if self.capture is None else self.capture.count(expert)
            for projection, part in rows.items():
                found.append(
                    ModuleResult(
                        name=self.module_name(expert, projection),
                        outcome=outcomes[index],
                        num_tokens=tokens,
                        blend_weight=None if tokens is None else borrowed_share(tokens, borrowed),
                        dampening_frac=None if dampening is None else dampening[index],
                        relative_weight_error=_relative(errors[:2], index, part),
                        relative_output_error=_relative(errors[2:], index, part) if len(errors) > 2 else None,
                    )
                )
        return found


def solve_batch(batch: SolverBatch, recipe: Recipe) -> SolvedBatch:
    """By the recipe's solver. Matrices that share one Hessian are solved as one tall matrix: it is factorized once."""
    count, rows = batch.weight_EOI.shape[:2]
    shared = batch.hessian_EII is not None and batch.hessian_EII.shape[0] < count
    given = SolverBatch(batch.weight_EOI.flatten(0, 1).unsqueeze(0), batch.hessian_EII) if shared else batch
    solved = SOLVERS[recipe.solver](given, recipe)
    if not shared:
        return solved
    codes, scale = (value.reshape(count, rows, -1) for value in (solved.codes_EOI, solved.scale_EOG))
    return SolvedBatch(codes, scale, solved.outcomes * count, solved.dampening * count)


def report_step(parts: Sequence[tuple[int, int, int]]) -> int:
    """Errors are reported from every so many-th row: of each projection (start, stop, 1), at least REPORT_ROWS."""
    step = 1
    while all(start % (2 * step) == 0 and stop - start >= 2 * step * REPORT_ROWS for start, stop, _ in parts):
        step *= 2
    return step


def _row_energy(matrix_EOC: Tensor, moment_ECC: Tensor | None) -> Tensor:
    """Per row, its square under the second moment of the input (or the plain square): [E, O].

    All matrices may share one moment.

    On a GPU the product is in BF16: a report needs no more digits, and float32 would cost as much as solving.
    """
    if moment_ECC is None:
        other = matrix_EOC
    elif matrix_EOC.is_cuda:
        moments = moment_ECC.bfloat16().expand(matrix_EOC.shape[0], -1, -1)
        other = torch.bmm(matrix_EOC.bfloat16(), moments, out_dtype=torch.float32)
    else:
        other = torch.matmul(matrix_EOC, moment_ECC)
    return (matrix_EOC * other).sum(dim=-1)


def _relative(error_and_whole: Tensor, index: int, part: slice) -> float:
    error, whole = (float(value[index, part].double().sum()) for value in error_and_whole)
    return (max(error, 0.0) / whole) ** 0.5 if whole > 0 else 0.0

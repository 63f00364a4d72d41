"""One layer's routed experts: statistics from their own tokens, solving, packing, and their output for the next layer.

The order saves memory and passes over the data: gate and up of all experts first, then down, whose input is what the
*quantized* gate and up give. Only the small down Hessians of a whole layer are held at once.

Shape suffixes: T = tokens, H = hidden size, I = expert width, J = 2 I (gate rows, then up rows), E = experts of a
chunk, O, C = rows and columns of a projection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvq.calibration.experts import Routing, gated_activation
from kvq.calibration.stats import blend_hessian, blend_weight, gram
from kvq.quantize.pack import pack_batch
from kvq.quantize.qparams import from_codes
from kvq.quantize.solvers import SOLVERS
from kvq.quantize.types import ModuleResult, SolvedBatch, SolverBatch
from kvq.recipes.schema import Recipe

GATE_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)


class ExpertSource(Protocol):
    """Where an expert's weights come from, dequantized."""

    def expert_gate_up(self, layer: int, experts: range) -> Tensor: ...

    def expert_down(self, layer: int, experts: range) -> Tensor: ...

    def read_ahead(self, layer: int, experts: range, projections: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """What the router sent where during calibration: inputs of all tokens, and the rows of each expert."""

    x_TH: Tensor
    routing: Routing


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
    _gate_up: dict[int, Callable[[], Tensor]] = field(default_factory=dict)
    _down_sums: dict[int, Tensor] = field(default_factory=dict)

    def solve(self) -> SolvedLayer:
        chunks = self.chunks
        with torch.no_grad():
            layer_mean = None
            if self.capture is not None:
                layer_mean = gram(self.capture.x_TH) / self.capture.x_TH.shape[0]
            for number, experts in enumerate(chunks):
                self.progress(f"gate/up {experts.stop}/{self.num_experts}")
                if number + 1 < len(chunks):
                    self.source.read_ahead(self.layer, chunks[number + 1], GATE_UP)
                else:
                    self.source.read_ahead(self.layer, chunks[0], DOWN)
                self._solve_gate_up(experts, layer_mean)
            down_mean = self._pooled_down()
            if self.capture is not None:
                self._solved.output_TH = torch.zeros_like(self.capture.x_TH, dtype=torch.float32)
            for number, experts in enumerate(chunks):
                self.progress(f"down {experts.stop}/{self.num_experts}")
                if number + 1 < len(chunks):
                    self.source.read_ahead(self.layer, chunks[number + 1], DOWN)
                self._solve_down(experts, down_mean)
        return self._solved

    def _tokens(self, expert: int) -> Tensor:
        assert self.capture is not None
        return self.capture.x_TH[self.capture.routing.token_R[self.capture.routing.rows(expert)]]

    def _hessians(self, experts: range, own_sum: Callable[[int], Tensor], mean_CC: Tensor | None) -> Tensor | None:
        if self.capture is None or mean_CC is None:
            return None
        routing, blend = self.capture.routing, self.recipe.hessian_blend_tokens
        return torch.stack([blend_hessian(own_sum(e), routing.count(e), mean_CC, blend) for e in experts])

    def _solve_gate_up(self, experts: range, layer_mean_HH: Tensor | None) -> None:
        weight_EJH = self.source.expert_gate_up(self.layer, experts)
        hessian = self._hessians(experts, lambda e: gram(self._tokens(e)), layer_mean_HH)
        batch = SolverBatch(weight_EJH.float(), hessian)
        solved = SOLVERS[self.recipe.solver](batch, self.recipe)
        half = weight_EJH.shape[1] // 2
        self._record(experts, batch, solved, {"gate_proj": slice(0, half), "up_proj": slice(half, None)})
        if self.capture is None:
            return
        for index, expert in enumerate(experts):
            self._gate_up[expert] = self._used(weight_EJH, solved, index)
            self._down_sums[expert] = gram(gated_activation(self._tokens(expert), self._gate_up[expert]()))

    def _used(self, weight_EOC: Tensor, solved: SolvedBatch, index: int) -> Callable[[], Tensor]:
        """Gives the weights that the next module's input is computed with; codes take half the memory of weights."""
        if not self.recipe.propagate_error:
            return lambda: weight_EOC[index]
        codes_OC, scale_OG, dtype = solved.codes_EOI[index], solved.scale_EOG[index], weight_EOC.dtype
        return lambda: from_codes(codes_OC, scale_OG).to(dtype)

    def _pooled_down(self) -> Tensor | None:
        """Mean second moment of down's inputs over all experts' tokens."""
        if self.capture is None:
            return None
        total = torch.stack(list(self._down_sums.values())).sum(dim=0)
        return total / max(1, self.capture.routing.start[-1])

    def _solve_down(self, experts: range, down_mean_II: Tensor | None) -> None:
        weight_EHI = self.source.expert_down(self.layer, experts)
        batch = SolverBatch(weight_EHI.float(), self._hessians(experts, self._down_sums.__getitem__, down_mean_II))
        solved = SOLVERS[self.recipe.solver](batch, self.recipe)
        self._record(experts, batch, solved, {"down_proj": slice(None)})
        if self.capture is None:
            return
        for index, expert in enumerate(experts):
            self._add_output(expert, self._used(weight_EHI, solved, index)())

    def _add_output(self, expert: int, down_HI: Tensor) -> None:
        assert self.capture is not None and self._solved.output_TH is not None
        routing = self.capture.routing
        hidden_TI = gated_activation(self._tokens(expert), self._gate_up.pop(expert)())
        weight_T1 = routing.weight_R[routing.rows(expert)].float().unsqueeze(-1)
        token_T = routing.token_R[routing.rows(expert)]
        output_TH = F.linear(hidden_TI, down_HI).float().mul_(weight_T1)
        # A token goes to an expert once, so this is a sum without collisions; `index_add_` would use slow atomics.
        self._solved.output_TH[token_T] = output_TH.add_(self._solved.output_TH[token_T])

    def _record(self, experts: range, batch: SolverBatch, solved: SolvedBatch, rows: dict[str, slice]) -> None:
        """Pack each projection and note its errors."""
        delta_EOC = from_codes(solved.codes_EOI, solved.scale_EOG) - batch.weight_EOI
        weight_errors = _row_energy(delta_EOC, None), _row_energy(batch.weight_EOI, None)
        output_errors = None
        if batch.hessian_EII is not None:
            output_errors = _row_energy(delta_EOC, batch.hessian_EII), _row_energy(batch.weight_EOI, batch.hessian_EII)
        packed = pack_batch(solved.codes_EOI, solved.scale_EOG)
        for index, expert in enumerate(experts):
            tokens = None if self.capture is None else self.capture.routing.count(expert)
            for projection, part in rows.items():
                name = self.module_name(expert, projection)
                self._solved.tensors |= packed.module(name, index, part)
                self._solved.results.append(
                    ModuleResult(
                        name=name,
                        outcome=solved.outcomes[index],
                        num_tokens=tokens,
                        blend_weight=None if tokens is None else blend_weight(tokens, self.recipe.hessian_blend_tokens),
                        dampening_frac=None if batch.hessian_EII is None else solved.dampening[index],
                        relative_weight_error=_relative(weight_errors, index, part),
                        relative_output_error=None if output_errors is None else _relative(output_errors, index, part),
                    )
                )


def _row_energy(matrix_EOC: Tensor, moment_ECC: Tensor | None) -> Tensor:
    """Per row, its square under the second moment of the input (or the plain square): [E, O] on the host.

    On a GPU the product is in BF16: a report needs no more digits, and float32 would cost as much as solving.
    """
    if moment_ECC is None:
        other = matrix_EOC
    elif matrix_EOC.is_cuda:
        other = torch.bmm(matrix_EOC.bfloat16(), moment_ECC.bfloat16(), out_dtype=torch.float32)
    else:
        other = torch.bmm(matrix_EOC, moment_ECC)
    return (matrix_EOC * other).sum(dim=-1).cpu()


def _relative(error_and_whole: tuple[Tensor, Tensor], index: int, part: slice) -> float:
    error, whole = (float(value[index, part].double().sum()) for value in error_and_whole)
    return (max(error, 0.0) / whole) ** 0.5 if whole > 0 else 0.0

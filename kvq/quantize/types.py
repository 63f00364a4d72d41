"""What solvers take and give.

Shape suffixes: E = matrices of one shape solved together, O = out_features, I = in_features, G = groups of columns.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Outcome = Literal["solved", "rounded", "hessian_not_positive_definite"]
FALLBACKS: tuple[Outcome, ...] = ("hessian_not_positive_definite",)


@dataclass(frozen=True, slots=True, eq=False)
class SolverBatch:
    """Float32 weights, and for each matrix the mean over tokens of x x^T of its input (None: no data, or none needed).

    Rows that read the same input (gate and up) are stacked into one matrix, so that their Hessian is factorized once.
    """

    weight_EOI: Tensor
    hessian_EII: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class SolvedBatch:
    """int8 codes in [-8, 7]; BF16 scales, exactly those that are stored; per matrix what happened."""

    codes_EOI: Tensor
    scale_EOG: Tensor
    outcomes: tuple[Outcome, ...]
    dampening: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleResult:
    """One written matrix. Errors are relative to the source's weights (or outputs over the calibration data)."""

    name: str
    outcome: Outcome
    num_tokens: int | None
    blend_weight: float | None
    dampening_frac: float | None
    relative_weight_error: float
    relative_output_error: float | None

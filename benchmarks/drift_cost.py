"""What `drift_correction` costs a layer of real size: operations and kernels, counted without a device.

    python benchmarks/drift_cost.py [--hidden 6144] [--width 2048] [--experts 256] [--chunk 34] [--tokens 32768]

Everything runs on torch's `meta` device: shapes only. A kernel is an operator that is no view; what a library launches
inside one is not seen. Correcting the weights is counted in two ways: one solution for every row of W, as it was first
written, and kvq's own, a solution for a square matrix and a product.
"""

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kvq.calibration.experts import gated_activation
from kvq.quantize.drift import corrected_weight
from kvq.recipes.schema import load_recipe

ATEN = torch.ops.aten


class Kernels(TorchDispatchMode):
    """Counts operators that make or change memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func not in (ATEN.empty.memory_format, ATEN.expand.default)
        return func(*args, **(kwargs or {}))


def _factorized(matrix: Any, *_: Any, **__: Any) -> int:
    return math.prod(matrix[:-2]) * matrix[-1] ** 3 // 3


def _triangular(factor: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(math.prod(right[:-2]) * factor[-1] ** 2 * right[-1])


def _solved_by_factor(right: Any, factor: Any, *_: Any, **__: Any) -> int:
    return 2 * _triangular(factor, right)


def _solved(matrix: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * _factorized(matrix) + 2 * _triangular(matrix, right)


FORMULAS = {
    ATEN.linalg_cholesky_ex: _factorized,
    ATEN.linalg_solve_triangular: _triangular,
    ATEN.cholesky_solve: _solved_by_factor,
    ATEN._linalg_solve_ex: _solved,
}


def cost(call: Callable[[], Any]) -> tuple[dict[str, float], int]:
    """Gigaoperations by kind, and kernels."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter, torch.no_grad():
        call()
    with Kernels() as kernels, torch.no_grad():
        call()
    by_kind = counter.get_flop_counts()["Global"]
    return {str(kind).removeprefix("aten."): count / 1e9 for kind, count in by_kind.items()}, kernels.count


def every_row(weight_EOI: Tensor, drift_EII: Tensor, hessian_EII: Tensor) -> Tensor:
    """The same weights by one solution for all rows of W."""
    dampened_EII = hessian_EII.clone()
    dampened_EII.diagonal(dim1=-2, dim2=-1).add_(1.0)
    shift_EIO: Tensor = torch.linalg.solve_ex(dampened_EII, torch.bmm(drift_EII.mT, weight_EOI.mT)).result
    return weight_EOI + shift_EIO.mT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("hidden", 6144), ("width", 2048), ("experts", 256), ("chunk", 34), ("tokens", 32768))
    for name, value in sizes:
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    tokens_TH = empty(given.tokens, given.hidden, dtype=torch.bfloat16)
    gate_up_JH = empty(2 * given.width, given.hidden, dtype=torch.bfloat16)
    hidden_TI = empty(given.tokens, given.width, dtype=torch.bfloat16)
    weight_EOI = empty(given.chunk, given.hidden, given.width)
    square_EII = empty(given.chunk, given.width, given.width)
    counts, recipe = [given.tokens] * given.chunk, load_recipe("int4")
    calls: list[tuple[str, int, Callable[[], Any]]] = [
        ("the source's gate and up, less the quantized", given.experts,
         lambda: gated_activation(tokens_TH, gate_up_JH) - hidden_TI),
        ("the cross moment", given.experts, lambda: torch.mm(hidden_TI.T, hidden_TI, out_dtype=torch.float32)),
        ("weights, solved for every row", -(-given.experts // given.chunk),
         lambda: every_row(weight_EOI, square_EII, square_EII)),
        ("weights, as kvq does", -(-given.experts // given.chunk),
         lambda: corrected_weight(weight_EOI, square_EII, square_EII, counts, recipe)),
    ]  # fmt: skip
    for name, times, call in calls:
        operations, kernels = cost(call)
        per_expert = given.chunk if "weights" in name else 1
        kinds = ", ".join(f"{kind} {count / per_expert:.1f}" for kind, count in operations.items())
        total = sum(operations.values()) / per_expert
        sys.stdout.write(f"{name}: {total:.1f} GFLOP an expert ({kinds}); {kernels * times} kernels a layer\n")


if __name__ == "__main__":
    main()

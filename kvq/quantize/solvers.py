"""The only dispatch from a solver's name to its function."""

from collections.abc import Callable, Mapping

from kvq.quantize.awq import solve_awq
from kvq.quantize.gptq import solve_gptq
from kvq.quantize.rtn import solve_rtn
from kvq.quantize.types import SolvedBatch, SolverBatch
from kvq.recipes.schema import Recipe

SOLVERS: Mapping[str, Callable[[SolverBatch, Recipe], SolvedBatch]] = {
    "gptq": solve_gptq,
    "awq": solve_awq,
    "rtn": solve_rtn,
}

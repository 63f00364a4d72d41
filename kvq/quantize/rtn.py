"""Round to nearest."""

from kvq.quantize.qparams import find_scales, to_codes
from kvq.quantize.types import Outcome, SolvedBatch, SolverBatch
from kvq.recipes.schema import Recipe


def solve_rtn(batch: SolverBatch, recipe: Recipe) -> SolvedBatch:
    """Nearest codes under the recipe's scales. Hessians, if given, are not looked at."""
    scale_EOG = find_scales(batch.weight_EOI, None, recipe)
    count = batch.weight_EOI.shape[0]
    rounded: Outcome = "rounded"
    outcomes = (rounded,) * count
    return SolvedBatch(to_codes(batch.weight_EOI, scale_EOG), scale_EOG, outcomes, (0.0,) * count)

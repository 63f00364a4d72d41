"""Which second moments an expert is solved by: the three meanings of a recipe's `hessian`.

Shape suffixes: E = experts, C = columns.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from kvq.calibration.stats import blend_hessian, blend_weight
from kvq.recipes.schema import Recipe


def borrowed_tokens(recipe: Recipe, down: bool) -> float:
    """Weight of the layer-wide mean, in tokens: infinite where an expert has no moments of its own.

    `layer` holds for gate and up, whose inputs are the layer's for every expert; the inputs of down are made by each
    expert's own gate and up, so they are blended.
    """
    if recipe.hessian == "routed":
        return 0.0
    return math.inf if recipe.hessian == "layer" and not down else recipe.hessian_blend_tokens


def expert_moments(sums: Iterable[Tensor], counts: Sequence[int], mean_CC: Tensor, borrowed: float) -> Tensor:
    """Mean second moments by which experts are solved: [E, C, C], or [1, C, C] where all take the layer's.

    `sums` are those of the experts' own tokens. An expert without tokens takes the layer's, whatever the rule.
    """
    if math.isinf(borrowed):
        return mean_CC.unsqueeze(0)
    moments_ECC = mean_CC.new_empty(len(counts), *mean_CC.shape)
    for own_CC, n, moment_CC in zip(sums, counts, moments_ECC, strict=True):
        blend_hessian(own_CC, n, mean_CC, borrowed, moment_CC)
    return moments_ECC


def borrowed_share(num_tokens: int, borrowed: float) -> float:
    """The layer's share in an expert's moments."""
    return 1.0 if math.isinf(borrowed) else blend_weight(num_tokens, borrowed)

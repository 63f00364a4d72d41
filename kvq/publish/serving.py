"""What an operator must know to serve the output. Facts by engine; each line here was read in or run on the engine."""

from typing import Any

from kvq.recipes.plan import QuantPlan

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8, 16)

# SGLang 0.5.17 to 0.5.23: fused shared experts would be dropped beside INT4 experts, with at most a warning; the
# all-to-all back ends have no INT4 path.
SGLANG_FLAGS = ("--disable-shared-experts-fusion", "--moe-a2a-backend none")


def valid_tensor_parallel_sizes(plan: QuantPlan) -> list[int]:
    """Sizes at which an expert's slice is whole groups (and a shared expert's whole FP8 blocks).

    SGLang checks neither and misplaces scales without a word.
    """
    width = plan.facts.moe_intermediate_size
    group = plan.source.group_size or plan.recipe.group_size
    units = [group]
    if plan.source.block is not None and plan.recipe.rest == "keep":
        units.append(plan.source.block[0])
    return [size for size in TENSOR_PARALLEL_SIZES if all(width % (size * unit) == 0 for unit in units)]


def serving_notes(plan: QuantPlan, target: str) -> dict[str, Any]:
    """Flags for the target engine and the tensor-parallel sizes that fit."""
    return {
        "engine": target,
        "flags": list(SGLANG_FLAGS) if target == "sglang" else [],
        "tensor_parallel_sizes": valid_tensor_parallel_sizes(plan),
    }

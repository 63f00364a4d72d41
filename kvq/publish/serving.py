"""What an operator must know to serve the output. Facts by engine; each line here was read in or run on the engine."""

from typing import Any

from kvq.publish.parallel import valid_tensor_parallel_sizes
from kvq.recipes.plan import QuantPlan

# SGLang 0.5.17 to 0.5.23: fused shared experts would be dropped beside INT4 experts, with at most a warning; the
# all-to-all back ends have no INT4 path.
SGLANG_FLAGS = ("--disable-shared-experts-fusion", "--moe-a2a-backend none")


def serving_notes(plan: QuantPlan, target: str) -> dict[str, Any]:
    """Flags for the target engine and the tensor-parallel sizes that fit."""
    return {
        "engine": target,
        "flags": list(SGLANG_FLAGS) if target == "sglang" else [],
        "tensor_parallel_sizes": valid_tensor_parallel_sizes(plan),
    }

"""Serving arithmetic: weights and KV cache on given GPUs, before and after. Arithmetic, not a measurement."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from kvq.errors import RecipeError
from kvq.publish.gpus import Gpu
from kvq.publish.kv_cache import KvDtype, KvLayout, kv_layouts, num_indexer_layers
from kvq.publish.parallel import GROUP_SIZES, TENSOR_PARALLEL_SIZES, Parallel, problems, weights_per_gpu
from kvq.recipes.plan import QuantPlan
from kvq.recipes.tally import Kind

RESERVED = 0.12  # share of a GPU left to activations, CUDA graphs and the runtime; engines' own defaults are near it


@dataclass(frozen=True, slots=True)
class Deployment:
    """`gpus` of one kind; `gpus / tp` copies of the model are served side by side."""

    gpu: Gpu
    gpus: int
    parallel: Parallel
    context: int
    kv_dtype: KvDtype | None = None

    @property
    def replicas(self) -> int:
        return self.gpus // self.parallel.tp


def make_deployment(
    gpu: Gpu, gpus: int, parallel: Parallel, context: int | None, kv_dtype: KvDtype | None, model_context: int
) -> Deployment:
    """Raises RecipeError for sizes that make no sense together."""
    if parallel.tp > gpus or gpus % parallel.tp:
        raise RecipeError(f"--gpus {gpus} is no multiple of --tp {parallel.tp}.")
    if parallel.tp % parallel.ep or parallel.tp % parallel.dp:
        raise RecipeError(f"--ep {parallel.ep} and --dp {parallel.dp} must divide --tp {parallel.tp}.")
    if context is not None and context > model_context:
        raise RecipeError(f"--context {context}: the model's config allows {model_context} positions.")
    return Deployment(gpu, gpus, parallel, context or min(32768, model_context), kv_dtype)


@dataclass(frozen=True, slots=True)
class KvFit:
    """What a KV layout allows: tokens and requests of the given context, over all GPUs."""

    layout: str
    dtype: KvDtype
    bytes_per_token: int
    tokens: int
    requests: int


def kv_fits(layouts: Sequence[KvLayout], pool_bytes: int, deployment: Deployment) -> list[KvFit]:
    """Tokens and requests that fit `pool_bytes` on each GPU. Each data-parallel group has a pool of its own."""
    pools = deployment.replicas * deployment.parallel.dp
    fits = []
    for layout in layouts:
        if deployment.kv_dtype in (None, layout.dtype):
            tokens = max(0, pool_bytes) // layout.on_each_gpu
            requests = tokens // deployment.context
            fits.append(KvFit(layout.name, layout.dtype, layout.bytes_per_token, tokens * pools, requests * pools))
    return fits


def serving_sizes(
    plan: QuantPlan, before: Sequence[Kind], after: Sequence[Kind], deployment: Deployment
) -> dict[str, Any]:
    """Per-GPU weights and KV room of source and output, as plain data."""
    layouts = kv_layouts(plan.facts, num_indexer_layers(after), deployment.parallel.attention_tp)
    usable = round(deployment.gpu.memory_bytes * (1 - RESERVED))
    sides = {}
    for side, kinds in (("before", before), ("after", after)):
        weights = weights_per_gpu(kinds, plan, deployment.parallel)
        sides[side] = {
            "weights_per_gpu": weights,
            "mtp_per_gpu": weights - weights_per_gpu(kinds, plan, deployment.parallel, mtp=False),
            "pool_per_gpu": usable - weights,
            "fits": usable > weights,
            "kv": [asdict(fit) for fit in kv_fits(layouts, usable - weights, deployment)],
        }
    return {
        "gpu": deployment.gpu.name,
        "gpu_title": deployment.gpu.title,
        "gpu_bytes": deployment.gpu.memory_bytes,
        "gpu_source": deployment.gpu.source,
        "gpus": deployment.gpus,
        **asdict(deployment.parallel),
        "replicas": deployment.replicas,
        "reserved_share": RESERVED,
        "context": deployment.context,
        "problems": problems(plan, deployment.parallel),
        **sides,
    }


def combinations(plan: QuantPlan) -> Iterator[dict[str, Any]]:
    """Every TP, EP and group size, with the reasons against it."""
    sizes = [plan.source.group_size] if plan.pass_through else list(GROUP_SIZES)
    for tp, ep, group in product(TENSOR_PARALLEL_SIZES, TENSOR_PARALLEL_SIZES, sizes):
        if ep <= tp:
            found = problems(plan, Parallel(tp, ep), group)
            yield {"tp": tp, "ep": ep, "group_size": group, "valid": not found, "problems": found}

"""What fits on a serving GPU: weights, a reserve, and KV cache in what is left. Arithmetic, not a measurement.

The reserve is SGLang's own estimate (0.5.23 `arg_groups/memory_hook.py:handle_gpu_memory_settings` and
`reserve_for_graph_mb`; the same terms in 0.5.17 `server_args.py`), with each term rounded up.
"""

from dataclasses import dataclass

from kvq.errors import RecipeError
from kvq.publish.gpus import Gpu
from kvq.publish.kv_cache import KvDtype, KvLayout, kv_layouts, num_indexer_layers
from kvq.publish.parallel import Parallel, held_bytes
from kvq.publish.served import Served

MIB, GIB = 2**20, 2**30
CHUNK = 8192  # tokens of a prefill step; SGLang's default on GPUs of 60 GB and more
MAX_RUNNING = 128
MTP_TOKENS = 4  # draft tokens of a step
FLOOR = 10 * GIB  # SGLang keeps at least this on GPUs of more than 60 GB
PAGE_SIZE = 64  # sparse attention knows no other; both roles of a pair must have the same
CANARY_BYTES = 128  # a token and GPU: four buffers of 32-byte records (kv_canary/pool_patcher/buffer_alloc.py)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of each GPU, in bytes; `max_total_tokens` are of the whole server, a multiple of the page size."""

    gpu_bytes: int
    weights: int
    reserve: int
    kv_bytes_per_token: int
    kv_layout: str
    mem_fraction: float
    max_total_tokens: int


def kv_layout_of(served: Served, dtype: KvDtype, parallel: Parallel, blackwell: bool) -> KvLayout:
    """The layout that SGLang takes. For sparse attention in FP8 it depends on the GPU's backend."""
    layouts = kv_layouts(served.facts, num_indexer_layers(served.kinds), parallel.attention_tp)
    fitting = [layout for layout in layouts if layout.dtype == dtype]
    return fitting[-1] if blackwell and dtype == "fp8_e4m3" else fitting[0]


def reserve_bytes(parallel: Parallel, role: str) -> int:
    """Activations, CUDA graphs and the runtime of one GPU."""
    tokens = max(CHUNK if role != "decode" else MAX_RUNNING * MTP_TOKENS, 2048)
    graphs = 0 if role == "prefill" else 2 * MAX_RUNNING * MIB
    activations = 512 * MIB + tokens * 3 * MIB // 2 + parallel.tp * GIB // 8
    return max(activations + graphs, FLOOR) + GIB


def memory_plan(
    served: Served, gpu: Gpu, parallel: Parallel, layout: KvLayout, role: str, *, draft: bool, canary: bool
) -> MemoryPlan:
    """Raises RecipeError where less than one prefill step of cache would fit."""
    weights = held_bytes(served.kinds, served.facts, parallel, mtp=draft)
    reserve = reserve_bytes(parallel, role)
    fraction = int((gpu.memory_bytes - reserve) / gpu.memory_bytes * 1000) / 1000
    layers = served.facts.num_layers
    token = layout.on_each_gpu * (layers + (1 if draft else 0)) // layers + (CANARY_BYTES if canary else 0)
    pool = round(gpu.memory_bytes * fraction) - weights
    tokens = max(0, pool) // token // PAGE_SIZE * PAGE_SIZE
    if tokens < CHUNK:
        raise RecipeError(
            f"{parallel.tp} x {gpu.title}: each holds {weights / 1e9:.1f} GB of weights and {reserve / 1e9:.1f} GB of "
            f"reserve in {gpu.gigabytes} GB, which leaves {max(0, pool) / 1e9:.1f} GB of KV cache: {tokens} tokens, "
            f"less than one prefill step of {CHUNK}. Give more --gpus, or another --gpu."
        )
    return MemoryPlan(gpu.memory_bytes, weights, reserve, token, layout.name, fraction, tokens)

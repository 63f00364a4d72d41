"""How many experts are solved together, and how much of their work is kept. Knows no tensors, so that a plan can say
what a run will need."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

CHUNK_BYTES = {"cpu": 2**30, "cuda": 12 * 2**30}
# What a layer may hold, where inputs of down can be kept from their statistics to the layer's output; those that are
# not are computed twice. On a CPU they get little, whatever the layer.
LAYER_BYTES = 54 * 2**30
KEPT_BYTES = 2**28


def chunk_bytes_per_expert(rows: int, columns: int) -> int:
    """Working memory of one matrix while it is solved: six copies of it and four Hessians, in float32."""
    return 4 * (6 * rows * columns + 4 * columns * columns)


def experts_per_chunk(device_type: str, rows: int, columns: int) -> int:
    """As many as fit the working memory; at least one."""
    return max(1, CHUNK_BYTES[device_type] // chunk_bytes_per_expert(rows, columns))


def expert_chunks(experts: range, fewest: int, device_type: str, rows: int, columns: int) -> list[range]:
    """A rank's experts, in order, in chunks that are solved together.

    Of ranks that own `fewest` experts or one more all have as many chunks, since they go through them in step: the last
    chunk takes in the one more.
    """
    size = experts_per_chunk(device_type, rows, columns)
    return [experts[start:stop] for start, stop in pairwise([*range(0, fewest, size), len(experts)])]


def layer_bytes(num_tokens: int, num_experts: int, hidden: int, inner: int) -> int:
    """What a rank holds on a GPU beside kept inputs, when the experts' output is added up: inputs of the experts in
    BF16 and their output in float32, codes of gate and up, second moments and drift of down, a chunk that is solved."""
    tokens = num_tokens * hidden * (2 + 4)
    experts = num_experts * (2 * inner * hidden + 2 * 4 * inner * inner)
    return tokens + experts + CHUNK_BYTES["cuda"]


def kept_budget(device_type: str, held: int) -> int:
    """Bytes for inputs of down that are kept, beside what a GPU holds anyway."""
    return KEPT_BYTES if device_type == "cpu" else max(0, LAYER_BYTES - held)


def num_kept(most_tokens: Sequence[int], bytes_per_token: int, budget: int) -> int:
    """How many of a rank's experts, from its first, have their inputs kept. `most_tokens` says of each place how many
    tokens the busiest rank has there: all ranks keep as many, since they exchange tokens in step."""
    return sum(total * bytes_per_token <= budget for total in accumulate(most_tokens))

"""How many experts are solved together, and how much of their work is kept. Knows no tensors, so that a plan can say
what a run will need."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

# On a GPU the blocks of a factorization wait for each other, whatever the number of matrices: for one of Kimi K2's size
# 7.0 ms in chunks of 7 and 4.5 in chunks of 12 (an H200, benchmarks/2026-11-30_h200_real-size-layer.md).
CHUNK_BYTES = {"cpu": 2**30, "cuda": 18 * 2**30}
# Inputs of down that are kept from their statistics to the layer's output; the rest are computed twice. On a GPU all of
# them: kept on two H200s, a layer of GLM-5.2's size took 5.4 s in place of 5.8, and half as much memory again.
KEPT_BYTES = {"cpu": 2**28, "cuda": 0}


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


def num_kept(most_tokens: Sequence[int], bytes_per_token: int, budget: int) -> int:
    """How many of a rank's experts, from its first, have their inputs kept. `most_tokens` says of each place how many
    tokens the busiest rank has there: all ranks keep as many, since they exchange tokens in step."""
    return sum(total * bytes_per_token <= budget for total in accumulate(most_tokens))

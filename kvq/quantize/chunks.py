"""How many experts are solved together. Knows no tensors, so that a plan can say what a run will need."""

CHUNK_BYTES = {"cpu": 2**30, "cuda": 12 * 2**30}


def chunk_bytes_per_expert(rows: int, columns: int) -> int:
    """Working memory of one matrix while it is solved: six copies of it and four Hessians, in float32."""
    return 4 * (6 * rows * columns + 4 * columns * columns)


def experts_per_chunk(device_type: str, rows: int, columns: int) -> int:
    """As many as fit the working memory; at least one."""
    return max(1, CHUNK_BYTES[device_type] // chunk_bytes_per_expert(rows, columns))


def expert_chunks(num_experts: int, device_type: str, rows: int, columns: int) -> list[range]:
    """All experts, in order, in chunks that are solved together."""
    size = experts_per_chunk(device_type, rows, columns)
    return [range(start, min(start + size, num_experts)) for start in range(0, num_experts, size)]

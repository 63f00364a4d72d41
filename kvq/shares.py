"""How the ranks of a run share things in a row, and how many were started. Knows no tensors, so that a plan can say who
writes what."""

import os

from kvq.errors import RecipeError


def launched() -> tuple[int, int]:
    """This process's rank and the number of ranks, as the launcher says.

    Raises RecipeError where `accelerate launch` started one process though several were asked for, as it does, without
    a word, on a machine without GPUs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if "WORLD_SIZE" not in os.environ and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        raise RecipeError(
            "accelerate launch was asked for several processes and started one, as it does where it sees no two GPUs. "
            "Give it --multi_gpu (with --device cpu for kvq on CPUs), or use torchrun --nproc-per-node N -m kvq ..."
        )
    return (int(os.environ["RANK"]), size) if size > 1 else (0, 1)


def share(count: int, rank: int, size: int) -> range:
    """A rank's part; parts differ by one at most."""
    return range(count * rank // size, count * (rank + 1) // size)


def check_enough(num_experts: int, size: int) -> None:
    """Raises RecipeError for a rank that would own no expert."""
    if size > num_experts:
        raise RecipeError(f"{size} ranks for {num_experts} experts: each needs one. Start {num_experts} at most.")

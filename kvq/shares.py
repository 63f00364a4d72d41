"""How the ranks of a run share things in a row. Knows no tensors, so that a plan can say who writes what."""

from kvq.errors import RecipeError


def share(count: int, rank: int, size: int) -> range:
    """A rank's part; parts differ by one at most."""
    return range(count * rank // size, count * (rank + 1) // size)


def check_enough(num_experts: int, size: int) -> None:
    """Raises RecipeError for a rank that would own no expert."""
    if size > num_experts:
        raise RecipeError(f"{size} ranks for {num_experts} experts: each needs one. Start {num_experts} at most.")

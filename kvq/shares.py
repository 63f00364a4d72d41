"""How the ranks of a run share things in a row. Knows no tensors, so that a plan can say who writes what."""

from kvq.errors import RecipeError


def share(count: int, rank: int, size: int) -> range:
    """A rank's part; parts differ by one at most."""
    return range(count * rank // size, count * (rank + 1) // size)


def check_even(num_experts: int, size: int) -> None:
    """Raises RecipeError: in an exchange each rank has one expert at a time, so all must own as many."""
    if num_experts % size:
        fits = [number for number in range(1, num_experts + 1) if num_experts % number == 0][:8]
        raise RecipeError(f"{size} ranks cannot share {num_experts} experts evenly; start {fits} of them.")

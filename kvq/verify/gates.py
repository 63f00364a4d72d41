"""Limits that figures must keep, from the recipe and the command line, and the error when one does not."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvq.errors import GateError
from kvq.recipes.schema import Gates
from kvq.verify.figures import Estimate, Figures


@dataclass(frozen=True, slots=True)
class GateResult:
    """`value` is None where the figure was not measured, which does not pass."""

    name: str
    figure: str
    value: float | None
    error: float | None
    limit: float
    passed: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """For example `mean KL is 0.0083 +/- 0.0002, above max_mean_kl 0.005`"""
        if self.value is None:
            return f"{self.figure} was not measured, {self.name} is {self.limit:g}"
        side = "above" if self.name.startswith("max_") else "below"
        return f"{self.figure} is {Estimate(self.value, self.error)}, {side} {self.name} {self.limit:g}"


def merge_gates(recipe: Gates | None, flags: Gates) -> Gates:
    """The flags' limits where there are any, else the recipe's."""
    base = recipe or Gates()
    given = flags.model_dump(exclude_none=True)
    given["min_recovery"] = {**base.min_recovery, **flags.min_recovery}
    return base.model_copy(update=given)


def check_gates(gates: Gates, figures: Figures, tasks: Mapping[str, Any]) -> list[GateResult]:
    """A result for each limit. `tasks` is the `tasks` object of all `kvq.tasks/1` reports together."""
    results = []
    for name, figure, limit, found in (
        ("max_mean_kl", "mean KL", gates.max_mean_kl, figures.mean_kld),
        ("min_same_top", "same top p", gates.min_same_top, figures.same_top_p),
        ("max_ppl_ratio", "PPL(Q)/PPL(base)", gates.max_ppl_ratio, figures.ppl_ratio),
    ):
        if limit is not None:
            results.append(_result(name, figure, limit, found))
    for task, limit in sorted(gates.min_recovery.items()):
        row = tasks.get(task)
        recovery = row.get("recovery") if isinstance(row, Mapping) else None
        error = row.get("recovery_error") if isinstance(row, Mapping) else None
        found = Estimate(float(recovery), error) if isinstance(recovery, int | float) else None
        results.append(_result("min_recovery", f"recovery of {task}", limit, found))
    return results


def _result(name: str, figure: str, limit: float, found: Estimate | None) -> GateResult:
    if found is None:
        return GateResult(name, figure, None, None, limit, passed=False)
    passed = found.value <= limit if name.startswith("max_") else found.value >= limit
    return GateResult(name, figure, found.value, found.error, limit, passed)


def require(results: list[GateResult], place: str) -> None:
    """Raises GateError that names every limit that is not kept."""
    failed = [result.sentence() for result in results if not result.passed]
    if failed:
        raise GateError(f"{place}: {'; '.join(failed)} ({len(failed)} of {len(results)} gates failed).")

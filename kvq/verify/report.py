"""What a verification found."""

from dataclasses import asdict, dataclass, field
from typing import Any

SHOWN_PROBLEMS = 5


@dataclass(slots=True)
class Check:
    """One kind of check. `num_checked` says how many things it looked at: a check of nothing has passed nothing."""

    name: str
    num_checked: int = 0
    problems: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def passed(self) -> bool:
        return not self.problems

    def expect(self, condition: bool, problem: str) -> None:
        """Count one thing, and its problem if the condition does not hold."""
        self.num_checked += 1
        if not condition:
            self.problems.append(problem)


@dataclass(slots=True)
class VerifyReport:
    """All checks of one folder."""

    folder: str
    checks: list[Check] = field(default_factory=list)
    worst_weight_errors: list[tuple[str, float]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        return {
            "folder": self.folder,
            "passed": self.passed,
            "checks": checks,
            "worst_weight_errors": self.worst_weight_errors,
        }

    def failure(self) -> str:
        """One sentence for the error."""
        failed = [check for check in self.checks if not check.passed]
        problems = [problem for check in failed for problem in check.problems]
        more = f" (and {len(problems) - SHOWN_PROBLEMS} more)" if len(problems) > SHOWN_PROBLEMS else ""
        names = ", ".join(check.name for check in failed)
        shown = "; ".join(problems[:SHOWN_PROBLEMS])
        return f"{self.folder}: {names} failed: {shown.rstrip('.')}{more}. Do not serve it; quantize again."

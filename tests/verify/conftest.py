"""A good output to damage, and what verification then says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvq.verify.checks import verify_checkpoint
from kvq.verify.report import VerifyReport
from tests.runs import Shared

Verify = Callable[..., VerifyReport]


@pytest.fixture
def damaged(shared: Shared, tmp_path: Path) -> Path:
    """A copy of a quantized GLM-5 that a test may break."""
    return shared.copy(shared.output("glm-5"), tmp_path / "damaged")


@pytest.fixture
def verify() -> Verify:
    """All checks of a folder, with its source if given."""

    return verify_checkpoint


def failed(report: VerifyReport) -> dict[str, list[str]]:
    """Problems by check, of the checks that failed."""
    return {check.name: check.problems for check in report.checks if not check.passed}

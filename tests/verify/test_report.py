"""Reports count what they looked at, and say in one sentence what is wrong."""

from kvq.verify.report import Check, VerifyReport


def report(problems: int) -> VerifyReport:
    check, other = Check("values"), Check("files")
    for number in range(problems + 2):
        check.expect(number >= problems, f"tensor {number} is bad")
    other.expect(True, "never")
    return VerifyReport("folder", [check, other])


def test_a_check_counts_and_passes() -> None:
    good = report(0)
    assert good.passed and [check.num_checked for check in good.checks] == [2, 1]


def test_failure_is_one_sentence_that_does_not_grow() -> None:
    text = report(7).failure()
    assert text.startswith("folder: values failed: tensor 0 is bad; ")
    assert "tensor 4 is bad (and 2 more). Do not serve it" in text
    assert "tensor 5" not in text and "\n" not in text


def test_report_as_data() -> None:
    data = report(1).as_dict()
    assert data["passed"] is False
    assert data["checks"][0] == {
        "name": "values", "num_checked": 3, "problems": ["tensor 0 is bad"], "note": "", "passed": False,
    }  # fmt: skip

"""Shares, their intervals, and two models on the same questions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Z95 = 1.959963984540054


def wilson(correct: int, total: int, z: float = Z95) -> tuple[float, float]:
    """The Wilson score interval of a share (Wilson 1927), 95 % by default: within [0, 1], also at 0 and 100 %."""
    assert 0 <= correct <= total and total > 0, f"{correct} of {total}"
    share, square = correct / total, z * z
    middle = share + square / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    low, high = (middle - half) / (1 + square / total), (middle + half) / (1 + square / total)
    return (0.0 if correct == 0 else max(0.0, low)), (1.0 if correct == total else min(1.0, high))


@dataclass(frozen=True, slots=True)
class Row:
    """One question: which, what was answered (as far as it counts), whether that is right, whether it was cut off."""

    id: str
    answer: str
    correct: bool
    cut: bool


def share(correct: int, total: int) -> dict[str, Any]:
    """A share with its interval, ready for a report."""
    return {"correct": correct, "total": total, "score": correct / total, "interval": list(wilson(correct, total))}


def side(rows: Sequence[Row]) -> dict[str, Any]:
    """One model's figures."""
    return {**share(sum(row.correct for row in rows), len(rows)), "cut": sum(row.cut for row in rows)}


def recovery(source_correct: int, quantized_correct: int) -> float | None:
    """Quantized score in percent of the source's; None where the source has none right."""
    return 100 * quantized_correct / source_correct if source_correct else None


def recovery_error(source: Sequence[Row], quantized: Sequence[Row]) -> float | None:
    """Standard error of the recovery, in percent: the ratio of two means over the same questions, by the delta method.

    None where the source has none right, or with one question.
    """
    count, right = len(source), sum(row.correct for row in source)
    if not right or count < 2:
        return None
    ratio = sum(row.correct for row in quantized) / right
    squares = sum((ours.correct - ratio * theirs.correct) ** 2 for theirs, ours in zip(source, quantized, strict=True))
    return 100 * math.sqrt(squares / (count * (count - 1))) / (right / count)


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided probability of a split as uneven as this if both directions were equally likely."""
    changed = lost + gained
    tail = sum(math.comb(changed, k) for k in range(min(lost, gained) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**changed)))


def compare(source: Sequence[Row], quantized: Sequence[Row]) -> dict[str, Any]:
    """Both models on the same questions in one order. Flips are right <-> wrong; `changed` counts any difference."""
    assert [row.id for row in source] == [row.id for row in quantized], "not the same questions"
    pairs = list(zip(source, quantized, strict=True))
    lost = [ours for theirs, ours in pairs if theirs.correct and not ours.correct]
    gained = [ours for theirs, ours in pairs if ours.correct and not theirs.correct]
    flips = [
        {"id": ours.id, "to": "right" if ours.correct else "wrong", "source": theirs.answer, "quantized": ours.answer}
        for theirs, ours in pairs
        if theirs.correct != ours.correct
    ]
    left, right = side(source), side(quantized)
    return {
        "source": left,
        "quantized": right,
        "recovery": recovery(left["correct"], right["correct"]),
        "recovery_error": recovery_error(source, quantized),
        "flips": {
            "lost": len(lost),
            "gained": len(gained),
            "changed": sum(theirs.answer != ours.answer for theirs, ours in pairs),
            "p_value": mcnemar(len(lost), len(gained)),
            "rows": flips,
        },
    }

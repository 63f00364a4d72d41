"""Intervals, flips and recovery against published and hand-computed values."""

import pytest

from kvq.verify.tasks.stats import Row, compare, mcnemar, recovery, wilson


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        # Newcombe 1998 (Statistics in Medicine 17), table I, method 3: the Wilson interval.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_equals_newcombes_table(correct: int, total: int, low: float, high: float) -> None:
    assert wilson(correct, total) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("total", [1, 7, 100, 10_000])
def test_wilson_stays_between_0_and_1_and_is_symmetric(total: int) -> None:
    for correct in {0, 1, total // 2, total - 1, total}:
        low, high = wilson(correct, total)
        assert 0 <= low <= correct / total <= high <= 1
        mirrored = wilson(total - correct, total)
        assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high))
    assert wilson(0, total)[0] == 0.0 and wilson(total, total)[1] == 1.0


@pytest.mark.parametrize(
    ("lost", "gained", "value"),
    [(0, 0, 1.0), (1, 0, 1.0), (0, 5, 0.0625), (5, 0, 0.0625), (2, 3, 1.0), (1, 9, 22 / 1024)],
)
def test_mcnemar_by_hand(lost: int, gained: int, value: float) -> None:
    assert mcnemar(lost, gained) == pytest.approx(value)


def test_mcnemar_of_many() -> None:
    assert 0 <= mcnemar(3000, 4000) < 1e-30


def test_recovery() -> None:
    assert recovery(50, 49) == 98.0 and recovery(50, 51) == 102.0 and recovery(0, 3) is None


def rows(*answers: str, right: str, cut: frozenset[int] = frozenset()) -> list[Row]:
    return [Row(f"r{i}", answer, answer == right, i in cut) for i, answer in enumerate(answers)]


def test_flips_are_right_to_wrong_and_wrong_to_right() -> None:
    source = rows("a", "a", "b", "b", "c", "a", right="a", cut=frozenset({4}))
    quantized = rows("a", "b", "a", "c", "c", "d", right="a", cut=frozenset({1, 4}))
    found = compare(source, quantized)
    assert (found["source"]["correct"], found["quantized"]["correct"], found["source"]["total"]) == (3, 2, 6)
    assert (found["source"]["cut"], found["quantized"]["cut"]) == (1, 2)
    assert found["recovery"] == pytest.approx(200 / 3)
    flips = found["flips"]
    assert (flips["lost"], flips["gained"], flips["changed"]) == (2, 1, 4)
    assert flips["rows"] == [
        {"id": "r1", "to": "wrong", "source": "a", "quantized": "b"},
        {"id": "r2", "to": "right", "source": "b", "quantized": "a"},
        {"id": "r5", "to": "wrong", "source": "a", "quantized": "d"},
    ]


def test_other_questions_are_our_mistake() -> None:
    with pytest.raises(AssertionError):
        compare(rows("a", "b", right="a"), rows("a", right="a"))

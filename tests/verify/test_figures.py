"""Figures of positions: a hand-computed example, and a plain float64 reference written from llama.cpp's formulas.

Shape suffixes: P = positions, V = vocabulary.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvq.verify.figures import KLD_PERCENTILES, Estimate, Figures, by_position, mean, percentiles, summarize
from kvq.verify.logits import Positions, position_rows

Array = NDArray[np.float64]
NAN = math.nan


def positions(kl: list[float], same: list[bool], base: list[float], other: list[float], **extra: Any) -> Positions:
    """Positions of one document, or of `document`."""
    numbers = extra.get("document", [0] * len(kl))
    places = extra.get("place", list(range(len(kl))))
    kl_P, base_P, other_P = (torch.tensor(values, dtype=torch.float64) for values in (kl, base, other))
    return Positions(kl_P, torch.tensor(same), base_P, other_P, torch.tensor(numbers), torch.tensor(places))


def test_two_positions_by_hand() -> None:
    """KL(p || q) = 1/4 ln 2 at the first position and ln 2 at the second; the tops agree at one of two."""
    p_PV = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], dtype=torch.float64)
    q_PV = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.3, 0.2]], dtype=torch.float64)
    kl, same, base, other = position_rows(p_PV.log(), q_PV.log(), torch.tensor([1, -1]))
    assert kl.tolist() == pytest.approx([0.25 * math.log(2), math.log(2)], rel=1e-14)
    assert same.tolist() == [False, True]
    assert base[0].item() == pytest.approx(math.log(0.25)) and other[0].item() == pytest.approx(math.log(0.5))
    assert math.isnan(base[1]) and math.isnan(other[1])


def test_summary_by_hand() -> None:
    """Three positions, two with a next token: p 1/4 and 1/2 in the base, 1/2 and 1/4 in the other."""
    base, other = [math.log(0.25), math.log(0.5), NAN], [math.log(0.5), math.log(0.25), NAN]
    found = summarize(positions([0.0, 0.1, 0.5], [True, True, False], base, other))
    assert (found.num_documents, found.num_positions, found.num_predicted) == (1, 3, 2)
    # mean 0.2; deviations -0.2, -0.1, 0.3: variance 0.14 / 2 = 0.07
    assert found.mean_kld.value == pytest.approx(0.2)
    assert found.mean_kld.error == pytest.approx(math.sqrt(0.07 / 3)) and found.mean_kld.document_error is None
    assert (found.max_kld.value, found.min_kld.value, found.max_kld.error) == (0.5, 0.0, None)
    assert found.percentile_kld["50"].value == pytest.approx(0.1)
    assert found.percentile_kld["90"].value == pytest.approx(0.42)  # 0.8 of the way from 0.1 to 0.5
    assert found.same_top_p.value == pytest.approx(2 / 3)
    assert found.same_top_p.error == pytest.approx(math.sqrt(2 / 3 * 1 / 3 / 2))  # p (1 - p) / (n - 1)
    assert all((found.mean_ppl_q, found.mean_ppl_base, found.ppl_ratio, found.mean_delta_p, found.rms_delta_p))
    assert found.mean_ppl_base is not None and found.mean_ppl_base.value == pytest.approx(math.sqrt(8))
    assert found.ppl_ratio is not None and found.ppl_ratio.value == pytest.approx(1.0)
    # ln ratios -ln 2 and ln 2: standard deviation sqrt 2 ln 2, over sqrt 2
    assert found.ppl_ratio.error == pytest.approx(math.log(2))
    assert found.cor_ln_ppl == pytest.approx(-1.0)
    assert found.mean_delta_p is not None and found.mean_delta_p.value == pytest.approx(0.0)
    assert found.rms_delta_p is not None and found.rms_delta_p.value == pytest.approx(0.25)
    assert found.max_delta_p == Estimate(0.25) and found.min_delta_p == Estimate(-0.25)


def llama_cpp(p_PV: Array, q_PV: Array, following: NDArray[np.int64]) -> dict[str, float]:
    """The formulas of llama.cpp's `kl_divergence`, by sums over positions in plain float64."""
    count = len(p_PV)
    kld = (p_PV * np.log(p_PV / q_PV)).sum(1)
    nll = -np.log(q_PV[np.arange(count), following])
    nll_base = -np.log(p_PV[np.arange(count), following])
    delta = np.exp(-nll) - np.exp(-nll_base)

    def mean_and_error(total: float, squares: float) -> tuple[float, float]:
        middle = total / count
        return middle, math.sqrt((squares / count - middle**2) / (count - 1))

    ln_q, ln_base = (mean_and_error(x.sum(), (x**2).sum()) for x in (nll, nll_base))
    covariance = ((nll * nll_base).sum() / count - nll.mean() * nll_base.mean()) / (count - 1)
    ln_ratio_error = math.sqrt(ln_q[1] ** 2 + ln_base[1] ** 2 - 2 * covariance)
    ratio = math.exp(ln_q[0] - ln_base[0])
    ppl_q, ppl_base = math.exp(ln_q[0]), math.exp(ln_base[0])
    q_variance, base_variance = (ppl_q * ln_q[1]) ** 2, (ppl_base * ln_base[1]) ** 2
    rms = math.sqrt((delta**2).mean())
    same = float((p_PV.argmax(1) == q_PV.argmax(1)).mean())
    return {
        "mean_kld": kld.mean(), "mean_kld.error": mean_and_error(kld.sum(), (kld**2).sum())[1], "max_kld": kld.max(),
        "mean_ppl_q": ppl_q, "mean_ppl_q.error": ppl_q * ln_q[1],
        "mean_ppl_base": ppl_base, "mean_ppl_base.error": ppl_base * ln_base[1],
        "ppl_ratio": ratio, "ppl_ratio.error": ratio * ln_ratio_error,
        "ln_ppl_ratio": ln_q[0] - ln_base[0], "ln_ppl_ratio.error": ln_ratio_error,
        "ppl_difference": ppl_q - ppl_base,
        "ppl_difference.error": math.sqrt(q_variance + base_variance - 2 * ppl_q * ppl_base * covariance),
        "cor_ln_ppl": covariance / (ln_q[1] * ln_base[1]),
        "mean_delta_p": delta.mean(), "mean_delta_p.error": mean_and_error(delta.sum(), (delta**2).sum())[1],
        "rms_delta_p": rms, "rms_delta_p.error": 0.5 / rms * mean_and_error((delta**2).sum(), (delta**4).sum())[1],
        "max_delta_p": delta.max(), "min_delta_p": delta.min(),
        "same_top_p": same, "same_top_p.error": math.sqrt(same * (1 - same) / (count - 1)),
    }  # fmt: skip


def figure(found: Figures, name: str) -> float:
    field, _, part = name.partition(".")
    value = getattr(found, field)
    return float(getattr(value, part or "value")) if isinstance(value, Estimate) else float(value)


@pytest.fixture(scope="module")
def drawn() -> tuple[Figures, dict[str, float], Array]:
    """Figures of 400 positions over 30 tokens, the reference's, and the reference's KL."""
    draw = np.random.default_rng(0)
    base, other = draw.normal(size=(400, 30)) * 3, np.zeros((400, 30))
    other = base + draw.normal(size=(400, 30)) * 0.3
    following = draw.integers(0, 30, 400)
    p_PV, q_PV = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (base, other))
    base_PV, other_PV = (torch.tensor(x).log_softmax(-1) for x in (base, other))
    rows = position_rows(base_PV, other_PV, torch.tensor(following, dtype=torch.int64))
    numbers, places = torch.arange(400) // 40, torch.arange(400) % 40
    found = summarize(Positions(*rows, document_P=numbers, place_P=places))
    return found, llama_cpp(p_PV, q_PV, following), (p_PV * np.log(p_PV / q_PV)).sum(1)


def test_equals_llama_cpp_s_formulas(drawn: tuple[Figures, dict[str, float], Array]) -> None:
    found, expected, _ = drawn
    assert {name: figure(found, name) for name in expected} == pytest.approx(expected, rel=1e-9)


def test_percentiles_lie_between_order_statistics(drawn: tuple[Figures, dict[str, float], Array]) -> None:
    found, _, kld = drawn
    ordered = sorted(kld)
    assert list(found.percentile_kld) == ["99.9", "99", "95", "90", "50", "10", "5", "1", "0.1"]
    for percent in KLD_PERCENTILES:
        place = percent / 100 * 399
        low = math.floor(place)
        expected = ordered[low] + (place - low) * (ordered[min(low + 1, 399)] - ordered[low])
        assert found.percentile_kld[f"{percent:g}"].value == pytest.approx(expected, rel=1e-12)


def test_error_of_a_percentile_is_about_that_of_many_draws() -> None:
    """Against the spread of 400 samples' medians; within a fifth."""
    draw = np.random.default_rng(1)
    medians, errors = [], []
    for _ in range(400):
        values = np.sort(draw.exponential(size=500))
        estimate = percentiles(values, (50.0,))["50"]
        medians.append(estimate.value)
        errors.append(estimate.error)
    assert float(np.mean(np.array(errors, dtype=float))) == pytest.approx(float(np.std(medians)), rel=0.2)


def test_error_by_documents() -> None:
    """Four documents whose positions are copies of one value: the error is that of four values, not of forty."""
    values = np.array([1.0, 2.0, 4.0, 5.0])
    found = mean(np.repeat(values, 10), np.repeat(np.arange(4), 10))
    assert found.document_error == pytest.approx(values.std(ddof=1) / 2)
    assert found.error is not None and found.error < 0.4 * float(values.std(ddof=1) / 2)


def test_buckets_double() -> None:
    rows = by_position(
        positions([0.0, 1.0, 2.0, 4.0, 8.0, 16.0], [True] * 6, [NAN] * 6, [NAN] * 6, place=[0, 1, 2, 3, 4, 9])
    )
    assert [(row["from"], row["to"], row["num_positions"]) for row in rows] == [
        (0, 0, 1), (1, 1, 1), (2, 3, 2), (4, 7, 1), (8, 15, 1),
    ]  # fmt: skip
    assert [row["mean_kld"]["value"] for row in rows] == [0, 1, 3, 8, 16]
    assert rows[0]["rms_delta_p"] is None


def test_nothing_differs() -> None:
    found = summarize(positions([0.0, 0.0], [True, True], [-1.0, -2.0], [-1.0, -2.0]))
    assert found.mean_kld == Estimate(0.0, 0.0, None) and found.same_top_p == Estimate(1.0, 0.0, None)
    assert found.ppl_ratio == Estimate(1.0, 0.0, None) and found.rms_delta_p == Estimate(0.0, 0.0, None)
    assert found.cor_ln_ppl == pytest.approx(1.0)

"""Gates: which limits apply, what passes, and what the error says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq.errors import GateError, RecipeError
from kvq.recipes.schema import Gates, load_recipe, make_gates, override
from kvq.verify.figures import Figures, summarize
from kvq.verify.gates import check_gates, merge_gates, require
from kvq.verify.logits import Positions


@pytest.fixture(scope="module")
def figures() -> Figures:
    """Mean KL 0.2 +/- 0.1, half of the tops equal, PPL ratio 1."""
    columns = torch.tensor([[0.1, 0.3], [1.0, 0.0], [-1.0, -2.0], [-2.0, -1.0]], dtype=torch.float64)
    return summarize(Positions(columns[0], columns[1].bool(), columns[2], columns[3], torch.zeros(2), torch.arange(2)))


@pytest.mark.parametrize(
    ("gates", "passed"),
    [
        ({"max_mean_kl": 0.21}, True),
        ({"max_mean_kl": 0.19}, False),
        ({"min_same_top": 0.5}, True),
        ({"min_same_top": 0.51}, False),
        ({"max_ppl_ratio": 1.01}, True),
        ({"max_ppl_ratio": 0.99}, False),
        ({"min_recovery": {"gsm8k": 98.0}}, True),
        ({"min_recovery": {"gsm8k": 99.0}}, False),
        ({"min_recovery": {"absent": 1.0}}, False),
        ({"min_recovery": {"unknown": 1.0}}, False),
    ],
)
def test_limits(figures: Figures, gates: dict[str, Any], passed: bool) -> None:
    tasks = {"gsm8k": {"recovery": 98.5}, "unknown": {"recovery": None}}
    (result,) = check_gates(Gates(**gates), figures, tasks)
    assert result.passed is passed


def test_the_error_names_figure_standard_error_and_limit(figures: Figures) -> None:
    gates = Gates(max_mean_kl=0.1, min_same_top=0.4, min_recovery={"gsm8k": 99.0})
    with pytest.raises(GateError) as error:
        require(check_gates(gates, figures, {}), "out")
    assert str(error.value) == (
        "out: mean KL is 0.2 +/- 0.1, above max_mean_kl 0.1; recovery of gsm8k was not measured, min_recovery is 99 "
        "(2 of 3 gates failed)."
    )
    assert error.value.exit_code == 10
    require(check_gates(Gates(), figures, {}), "out")


def test_ppl_ratio_that_cannot_be_had_does_not_pass(figures: Figures) -> None:
    (result,) = check_gates(Gates(max_ppl_ratio=2.0), replace(figures, ppl_ratio=None), {})
    assert not result.passed and result.sentence() == "PPL(Q)/PPL(base) was not measured, max_ppl_ratio is 2"


def test_flags_come_before_the_recipe() -> None:
    recipe = Gates(max_mean_kl=0.1, min_same_top=0.9, min_recovery={"a": 1.0, "b": 2.0})
    merged = merge_gates(recipe, Gates(max_mean_kl=0.5, min_recovery={"b": 3.0}))
    assert merged == Gates(max_mean_kl=0.5, min_same_top=0.9, min_recovery={"a": 1.0, "b": 3.0})
    assert merge_gates(None, Gates()) == Gates()


def test_gates_do_not_change_a_recipe_s_hash(tmp_path: Path) -> None:
    plain = load_recipe("int4")
    gated = override(plain, ["gates={max_mean_kl: 0.01}"]).model_copy(update={"name": plain.name})
    assert gated.gates == Gates(max_mean_kl=0.01) and gated.sha256 == plain.sha256
    with pytest.raises(RecipeError, match=r"--set: gates\.max_mean_kl: .* \(found -1\)"):
        override(plain, ["gates={max_mean_kl: -1}"])
    with pytest.raises(RecipeError, match=r"gates\.min_kl: there is no such field; there are max_mean_kl, "):
        override(plain, ["gates={min_kl: 1}"])


def test_flags_that_make_no_sense() -> None:
    assert make_gates(None, None, None, ["a=98.5"]) == Gates(min_recovery={"a": 98.5})
    with pytest.raises(RecipeError, match=r"--min-recovery gsm8k: expected TASK=PERCENT"):
        make_gates(None, None, None, ["gsm8k"])

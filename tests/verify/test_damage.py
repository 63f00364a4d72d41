"""A planted mistake is named by the report as the worst place, whatever else rounding did there.

Shape suffixes: T = tokens, H = hidden size, E = experts.
"""

import math
from pathlib import Path

import pytest
import torch

from kvq.verify.damage import Difference
from tests.checkpoints import edit_tensor
from tests.runs import Shared
from tests.verify.comparison import compare, whole_logits

LAYER, EXPERT = 2, 5


@pytest.mark.parametrize("name", ["glm-5", "glm-4.7", "kimi-k2"])
def test_an_expert_with_doubled_scales_is_the_worst(shared: Shared, tmp_path: Path, name: str) -> None:
    """Twice the down_proj gives twice the output: a relative error near 1, where INT4 gives a tenth of it."""
    other = shared.copy(shared.output(name), tmp_path / "other")
    edit_tensor(other, f"model.layers.{LAYER}.mlp.experts.{EXPERT}.down_proj.weight_scale", lambda scale: scale * 2)
    damage = compare(other, shared.source(name), shared.calibration, length=40).damage
    assert damage is not None
    worst = damage["worst"]["experts"][0]
    assert (worst["layer"], worst["expert"]) == (LAYER, EXPERT)
    assert worst["relative_error"] == pytest.approx(1.0, abs=0.15)
    assert damage["worst"]["layers"][0]["layer"] == LAYER
    before = compare(shared.output(name), shared.source(name), shared.calibration, length=40).damage
    assert before is not None and before["worst"]["experts"][0]["relative_error"] < 0.5


def test_an_expert_without_tokens_cannot_be_the_worst(shared: Shared, tmp_path: Path) -> None:
    """One token reaches few experts; the others' errors are unknown, and are not 0."""
    found = compare(shared.output("kimi-k2"), shared.source("kimi-k2"), shared.calibration, rows=1, length=2)
    assert found.damage is not None
    rows = found.damage["experts"]
    assert {row["relative_error"] is None for row in rows if row["tokens"] == 0} == {True}
    assert sum(row["tokens"] for row in rows) == 2 * 2 * 2  # tokens x experts a token x MoE layers


@pytest.mark.parametrize("name", ["glm-5", "glm-4.7", "kimi-k2"])
def test_swapped_router_rows_are_named(shared: Shared, tmp_path: Path, name: str) -> None:
    """The tokens of one expert go to the other: its layer's router is the worst, the two are the most rerouted."""
    source = shared.source(name)
    other = shared.copy(source, tmp_path / "other")
    first = compare(source, source, shared.calibration, rows=4).damage
    assert first is not None
    busy = sorted((row for row in first["experts"] if row["layer"] == LAYER), key=lambda row: -row["tokens"])
    swapped = busy[0]["expert"], busy[-1]["expert"]  # by many tokens and by few

    def swap(weight_EH: torch.Tensor) -> torch.Tensor:
        copy_EH = weight_EH.clone()
        copy_EH[swapped[0]], copy_EH[swapped[1]] = weight_EH[swapped[1]], weight_EH[swapped[0]]
        return copy_EH

    edit_tensor(other, f"model.layers.{LAYER}.mlp.gate.weight", swap)
    found = compare(other, source, shared.calibration, rows=4).damage
    assert found is not None
    (router,) = found["worst"]["routers"]
    assert router["layer"] == LAYER and router["router_agreement"] < 1
    assert {(row["layer"], row["expert"]) for row in found["worst"]["routed_experts"][:2]} == {
        (LAYER, expert) for expert in swapped
    }
    assert found["worst"]["experts"] == []  # their weights are as they were
    assert found["worst"]["layers"][0]["layer"] == LAYER
    behind = [row for row in found["layers"] if row["layer"] < LAYER]
    assert {row["accumulated_error"] for row in behind} == {0.0}


@pytest.mark.parametrize("part", ["self_attn.o_proj.weight", "mlp.shared_experts.up_proj.weight"])
def test_what_is_no_routed_expert_shows_in_its_layer(shared: Shared, tmp_path: Path, part: str) -> None:
    source = shared.source("deepseek-v3")
    other = shared.copy(source, tmp_path / "other")
    edit_tensor(other, f"model.layers.1.{part}", lambda weight: weight * 1.5)
    found = compare(other, source, shared.calibration, rows=2).damage
    assert found is not None
    assert [row["layer"] for row in found["worst"]["layers"]] == [1]
    assert found["worst"]["experts"] == []
    errors = [row["accumulated_error"] for row in found["layers"]]
    assert errors[0] == 0.0 and errors[1] > 0 and errors[2] > 0


def test_errors_of_a_layer_by_hand(shared: Shared, tmp_path: Path) -> None:
    """o_proj of the last layer doubled: hidden states after it, by running both models whole."""
    source = shared.source("deepseek-v3")
    other = shared.copy(source, tmp_path / "other")
    edit_tensor(other, "model.layers.0.self_attn.o_proj.weight", lambda weight: weight * 0)
    edit_tensor(other, "model.layers.0.mlp.down_proj.weight", lambda weight: weight * 0)
    found = compare(other, source, shared.calibration, rows=1).damage
    assert found is not None
    first = found["layers"][0]
    # A layer that adds nothing: all of what it should have added is missing.
    assert first["own_error"] == pytest.approx(1.0) and first["own_cosine"] == pytest.approx(0.0)
    assert first["router_agreement"] is None
    assert whole_logits(other, torch.tensor([1, 2])).isfinite().all()


def test_difference_by_hand() -> None:
    found = Difference()
    found.add(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 0.0]]]))
    found.add(torch.tensor([[[0.0, 5.0]]]), torch.tensor([[[0.0, 5.0]]]))
    assert found.relative_error == pytest.approx(math.sqrt(16 / 50))
    assert found.cosine == pytest.approx((0.6 + 1.0) / 2) and found.tokens == 2

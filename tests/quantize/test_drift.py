"""down is solved for what it gave on the source's inputs: against least squares over tokens, in float64.

Shape suffixes: T = tokens, E = experts, O = out_features, I = in_features.
"""

import pytest
import torch

from kvq.quantize.drift import corrected_weight
from tests import reference
from tests.quantize.problems import recipe, weights
from tests.quantize.tiny_layer import (
    HIDDEN,
    NOBODY,
    NUM_EXPERTS,
    SpySolver,
    TinyLayer,
    written_down,
    written_gate_up,
)

CORRECTED = {"drift_correction": True, "hessian": "routed", "dampening_frac": 0.1}


@pytest.mark.parametrize("tokens", [3, 40, 200])
@pytest.mark.parametrize("drift_tokens", [0.0, 30.0])
def test_equals_least_squares(tokens: int, drift_tokens: float) -> None:
    settings = recipe(dampening_frac=0.1, drift_dampening_tokens=drift_tokens)
    generator = torch.Generator().manual_seed(tokens)
    x_ETI = torch.randn(2, tokens, 16, generator=generator) * torch.linspace(0.1, 2, 16)
    source_ETI = x_ETI + 0.2 * torch.randn(2, tokens, 16, generator=generator) + 0.1
    w_EOI = torch.stack([weights(5, 16, seed).float() for seed in range(2)])
    drift_EII = (source_ETI - x_ETI).mT @ x_ETI / tokens
    hessian_EII = x_ETI.mT @ x_ETI / tokens
    found_EOI = corrected_weight(w_EOI, drift_EII, hessian_EII, [tokens, tokens], settings)
    for w_OI, source_TI, x_TI, found_OI in zip(w_EOI, source_ETI, x_ETI, found_EOI, strict=True):
        mean_square = float(x_TI.double().square().mean())
        ridge = (0.1 + drift_tokens / tokens) * mean_square * tokens
        expected_OI = reference.corrected(w_OI, source_TI, x_TI, ridge)
        torch.testing.assert_close(found_OI.double(), expected_OI, rtol=0, atol=2e-5)
        assert not torch.allclose(expected_OI, w_OI.double(), atol=1e-3)


def test_inputs_that_did_not_drift_change_nothing() -> None:
    w_EOI, zeros_EII = weights(5, 16, 0).float().unsqueeze(0), torch.zeros(1, 16, 16)
    for hessian_EII in (torch.eye(16).unsqueeze(0), zeros_EII):
        assert torch.equal(corrected_weight(w_EOI, zeros_EII, hessian_EII, [0], recipe()), w_EOI)


def test_down_is_corrected_for_its_own_gate_and_up(layer: TinyLayer, spy: SpySolver) -> None:
    solved = layer.solve(recipe(**CORRECTED, drift_dampening_tokens=20))
    (_, _), (given, _) = spy.calls
    assert given.hessian_EII is not None and given.weight_EOI.shape[1] == HIDDEN
    used_EJH = written_gate_up(solved.tensors)
    for expert in range(NUM_EXPERTS):
        tokens_TH = layer.tokens(expert)
        if expert == NOBODY:
            assert torch.equal(given.weight_EOI[expert], layer.down_EHI[expert])
            continue
        source_TI = reference.gated_activation(tokens_TH, layer.gate_up_EJH[expert])
        hidden_TI = reference.gated_activation(tokens_TH, used_EJH[expert])
        ridge = (0.1 + 20 / len(tokens_TH)) * float(hidden_TI.square().mean()) * len(tokens_TH)
        expected_OI = reference.corrected(layer.down_EHI[expert], source_TI, hidden_TI, ridge)
        torch.testing.assert_close(given.weight_EOI[expert].double(), expected_OI, rtol=0, atol=1e-4)


@pytest.mark.parametrize("off", [{"drift_correction": False}, {"propagate_error": False}])
def test_correction_can_be_left_out(layer: TinyLayer, spy: SpySolver, off: dict[str, bool]) -> None:
    layer.solve(recipe(**{**CORRECTED, **off}))
    assert torch.equal(spy.calls[1][0].weight_EOI, layer.down_EHI)


def test_correction_brings_the_output_closer(layer: TinyLayer) -> None:
    """On the calibration tokens, which is what it is fitted to."""
    plain = layer.forward(layer.gate_up_EJH, layer.down_EHI)
    distances = []
    for corrected in (False, True):
        settings = recipe(**{**CORRECTED, "drift_correction": corrected}, drift_dampening_tokens=0, refinement_passes=2)
        solved = layer.solve(settings)
        found = layer.forward(written_gate_up(solved.tensors), written_down(solved.tensors))
        distances.append(float((found - plain).norm() / plain.norm()))
    assert distances[1] < 0.95 * distances[0]


def test_reported_weight_error_is_that_of_the_source_s_weight(layer: TinyLayer) -> None:
    solved = layer.solve(recipe(**CORRECTED))
    written = written_down(solved.tensors)
    for result in solved.results:
        if "down_proj" in result.name:
            expert = int(result.name[1])
            error = float((written[expert] - layer.down_EHI[expert]).norm() / layer.down_EHI[expert].norm())
            assert result.relative_weight_error == pytest.approx(error, rel=1e-4)

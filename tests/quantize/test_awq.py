"""AWQ inside experts: clip search and smoothing against plain float64; what is scaled changes nothing.

Shape suffixes: T = tokens, E = experts, O = out_features, I = in_features, G = groups, H = hidden size.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvq.quantize.awq import ALPHAS, clip_scales, search_smoothing, solve_awq
from kvq.quantize.qparams import SHRINK_FACTORS
from kvq.quantize.types import SolverBatch
from tests import reference
from tests.quantize.problems import batch, moments, recipe, weights
from tests.quantize.tiny_layer import (
    HIDDEN,
    INTER,
    NOBODY,
    NUM_EXPERTS,
    TinyLayer,
    tiny_layer,
    written_down,
    written_gate_up,
)

AWQ = recipe(solver="awq", hessian="routed")


@pytest.fixture
def layer() -> TinyLayer:
    """Rows of up of very unequal size, so that down's inputs are."""
    plain = tiny_layer()
    size_EI = torch.exp2(2 * torch.randn(NUM_EXPERTS, INTER, generator=torch.Generator().manual_seed(3)))
    gate_EIH, up_EIH = plain.gate_up_EJH.chunk(2, dim=1)
    return replace(plain, gate_up_EJH=torch.cat([gate_EIH, up_EIH * size_EI.unsqueeze(-1)], dim=1))


def down_inputs(seed: int, columns: int = 64) -> Tensor:
    """[T, I], of very unequal columns that move together, as activations have."""
    generator = torch.Generator().manual_seed(seed)
    size_I = torch.exp2(3 * torch.randn(columns, generator=generator))
    return (torch.randn(90, columns, generator=generator) + torch.randn(90, 1, generator=generator)) * size_I


# Clip search and rounding.


@pytest.mark.parametrize("group_size", [32, 64])
def test_clip_search_equals_reference(group_size: int) -> None:
    given = batch(2, 6, 64)
    found_EOG = clip_scales(given.weight_EOI, moments(given), group_size)
    assert found_EOG.dtype == torch.bfloat16
    for w_OI, hessian_II, scale_OG in zip(given.weight_EOI, moments(given), found_EOG, strict=True):
        for row in range(w_OI.shape[0]):
            for group in range(64 // group_size):
                part = slice(group * group_size, (group + 1) * group_size)
                expected = reference.clip_scale(w_OI[row, part], hessian_II[part, part], SHRINK_FACTORS)
                assert float(scale_OG[row, group]) == pytest.approx(expected, rel=1e-6)


def test_codes_are_the_nearest_under_the_clipped_scales() -> None:
    given = batch(2, 6, 64)
    solved = solve_awq(given, AWQ)
    assert (solved.outcomes, solved.dampening) == (("solved",) * 2, (0.0,) * 2)
    for w_OI, scale_OG, codes_OI in zip(given.weight_EOI, solved.scale_EOG, solved.codes_EOI, strict=True):
        assert torch.equal(codes_OI.double(), reference.rtn(w_OI, scale_OG))


def test_nothing_is_changed_in_place() -> None:
    given = batch(2, 6, 64)
    kept = given.weight_EOI.clone(), moments(given).clone()
    solve_awq(given, AWQ)
    search_smoothing(given.weight_EOI, moments(given), 32)
    assert torch.equal(given.weight_EOI, kept[0]) and torch.equal(moments(given), kept[1])


# Smoothing.


@pytest.mark.parametrize("seed", range(4))
def test_smoothing_equals_reference(seed: int) -> None:
    hidden_TI, down_OI = down_inputs(seed), weights(8, 64, seed).float()
    hidden_TI[:, 5] = 0  # a column without input
    second_II = (hidden_TI.T @ hidden_TI / len(hidden_TI)).unsqueeze(0)
    (found_I,) = search_smoothing(down_OI.unsqueeze(0), second_II, 32)
    candidates = reference.smoothing_candidates(hidden_TI, ALPHAS)
    errors = [reference.smoothing_error(down_OI, hidden_TI, factor_I, 32) for factor_I in candidates]
    best = errors.index(min(errors))
    assert torch.equal(found_I.double(), candidates[best])
    assert found_I[5] == 1 and len(set(found_I.tolist())) > 2
    assert min(errors) < 0.9 * errors[0]  # better than no smoothing, which alpha 0 is


def test_an_expert_without_tokens_is_not_scaled() -> None:
    down_EOI = weights(8, 64, 0).float().unsqueeze(0)
    assert torch.equal(search_smoothing(down_EOI, torch.zeros(1, 64, 64), 32), torch.ones(1, 64))


def test_smoothing_is_chosen_by_each_expert_s_own_tokens(layer: TinyLayer) -> None:
    """And nothing else: other experts' tokens may be anything."""
    other = replace(layer, x_TH=layer.x_TH.clone())
    strangers = ~(other.expert_TK == 1).any(dim=1)
    other.x_TH[strangers] *= torch.linspace(5, 0.1, HIDDEN)
    ours, theirs = layer.solve(AWQ).tensors, other.solve(AWQ).tensors
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name.startswith("e1."))
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours if name.startswith("e2."))


def smoothing_of(layer: TinyLayer) -> Tensor:
    """The factors [E, I] that the search gives for the inputs that the source's gate and up make."""
    factors = []
    for expert in range(NUM_EXPERTS):
        hidden_TI = reference.gated_activation(layer.tokens(expert), layer.gate_up_EJH[expert]).float()
        second_II = hidden_TI.T @ hidden_TI / max(1, len(hidden_TI))
        factors.append(search_smoothing(layer.down_EHI[expert : expert + 1], second_II.unsqueeze(0), 32)[0])
    assert all(len(set(factor_I.tolist())) > 2 for expert, factor_I in enumerate(factors) if expert != NOBODY)
    assert torch.equal(factors[NOBODY], torch.ones(INTER))
    return torch.stack(factors)


def test_scaled_experts_are_the_same_function_to_the_bit(layer: TinyLayer) -> None:
    factor_EI = smoothing_of(layer)
    gate_EIH, up_EIH = layer.gate_up_EJH.chunk(2, dim=1)
    gate_up_EJH = torch.cat([gate_EIH, up_EIH / factor_EI.unsqueeze(-1)], dim=1)
    down_EHI = layer.down_EHI * factor_EI.unsqueeze(1)
    assert not torch.equal(down_EHI, layer.down_EHI)
    for dtype in (torch.float32, torch.bfloat16):
        before = layer.gate_up_EJH.to(dtype).float(), layer.down_EHI.to(dtype).float()
        after = gate_up_EJH.to(dtype).float(), down_EHI.to(dtype).float()
        assert torch.equal(layer.forward(*before), layer.forward(*after))


def test_written_experts_are_the_scaled_ones_rounded(layer: TinyLayer) -> None:
    solved = layer.solve(AWQ)
    factor_EI = smoothing_of(layer)
    gate_EIH, up_EIH = layer.gate_up_EJH.chunk(2, dim=1)
    scaled_EJH = torch.cat([gate_EIH, up_EIH / factor_EI.unsqueeze(-1)], dim=1)
    written_EJH, written_EHI = written_gate_up(solved.tensors), written_down(solved.tensors)
    for expert in range(NUM_EXPERTS):
        tokens_TH = layer.tokens(expert) if expert != NOBODY else layer.x_TH
        moment_HH = tokens_TH.T @ tokens_TH / len(tokens_TH)
        expected = solve_awq(SolverBatch(scaled_EJH[expert : expert + 1], moment_HH.unsqueeze(0)), AWQ)
        rounded_JH = reference.dequantize(expected.codes_EOI[0], expected.scale_EOG[0])
        torch.testing.assert_close(written_EJH[expert], rounded_JH, rtol=0, atol=0)
        scaled_HI = layer.down_EHI[expert].double() * factor_EI[expert]
        assert float((written_EHI[expert] - scaled_HI).norm() / scaled_HI.norm()) < 0.2


@pytest.mark.parametrize("propagate", [True, False])
def test_output_is_that_of_the_written_experts(layer: TinyLayer, propagate: bool) -> None:
    solved = layer.solve(recipe(solver="awq", propagate_error=propagate))
    assert solved.output_TH is not None
    written = written_gate_up(solved.tensors), written_down(solved.tensors)
    expected = layer.forward(*(written if propagate else (layer.gate_up_EJH, layer.down_EHI)))
    torch.testing.assert_close(solved.output_TH.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert {result.outcome for result in solved.results} == {"solved"}

"""LayerSolver: which statistics each expert gets, what is written, and what the layer gives out.

Shape suffixes: T = tokens, H = hidden size, I = expert width, J = 2 I, E = experts, C = columns.
"""

import gc
import weakref
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kvq.calibration.experts import gated_activation
from kvq.quantize import experts as experts_module
from kvq.quantize.capture import Capture
from kvq.quantize.chunks import CHUNK_BYTES, KEPT_BYTES, num_kept
from kvq.quantize.experts import LayerSolver, SolvedLayer, report_step
from kvq.quantize.gptq import solve_gptq
from kvq.quantize.types import ModuleResult, SolverBatch
from tests import reference
from tests.quantize.problems import recipe
from tests.quantize.tiny_layer import (
    HIDDEN,
    INTER,
    NOBODY,
    NUM_EXPERTS,
    ONE,
    PROJECTIONS,
    TWO,
    SpySolver,
    TinyLayer,
    expected_moments,
    written_down,
    written_gate_up,
    written_weight,
)

REFINED = recipe(refinement_passes=1)


def close(found: Tensor, expected: Tensor, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=rtol * float(expected.abs().max()))


def results(solved: SolvedLayer) -> dict[str, ModuleResult]:
    return {result.name: result for result in solved.results}


def test_the_layer_has_what_the_tests_are_about(layer: TinyLayer) -> None:
    counts = [layer.tokens(expert).shape[0] for expert in range(NUM_EXPERTS)]
    assert (counts[NOBODY], counts[ONE], counts[TWO]) == (0, 1, 2)
    assert min(counts[1], counts[2], counts[4]) > 10


@pytest.mark.parametrize("blend_tokens", [0, 4, 64.5])
def test_gate_and_up_share_one_blended_hessian(layer: TinyLayer, spy: SpySolver, blend_tokens: float) -> None:
    layer.solve(recipe(hessian_blend_tokens=blend_tokens))
    inputs = [layer.tokens(expert) for expert in range(NUM_EXPERTS)]
    mean_HH = reference.moment_sum(layer.x_TH) / layer.x_TH.shape[0]
    # One Hessian for the 2 I stacked rows of gate and up.
    assert spy.calls[0][0].weight_EOI.shape == (NUM_EXPERTS, 2 * INTER, HIDDEN)
    close(spy.hessians(2 * INTER), expected_moments(inputs, mean_HH, blend_tokens))


@pytest.mark.parametrize("blend_tokens", [0, 4, 64.5])
@pytest.mark.parametrize("propagate", [True, False])
def test_down_s_hessian_comes_from_what_gate_and_up_give(
    layer: TinyLayer, spy: SpySolver, propagate: bool, blend_tokens: float
) -> None:
    solved = layer.solve(recipe(propagate_error=propagate, hessian_blend_tokens=blend_tokens))
    used_EJH = written_gate_up(solved.tensors) if propagate else layer.gate_up_EJH
    inputs = [reference.gated_activation(layer.tokens(e), used_EJH[e]) for e in range(NUM_EXPERTS)]
    routed_II = reference.moment_sum(torch.cat(inputs)) / layer.expert_TK.numel()
    close(spy.hessians(HIDDEN), expected_moments(inputs, routed_II, blend_tokens), rtol=1e-4)


def test_routed_hessians_are_of_own_tokens_alone(layer: TinyLayer, spy: SpySolver) -> None:
    """But for the expert without any, which takes the layer's."""
    solved = layer.solve(recipe(hessian="routed", hessian_blend_tokens=64))
    mean_HH = reference.moment_sum(layer.x_TH) / layer.x_TH.shape[0]
    close(spy.hessians(2 * INTER), expected_moments([layer.tokens(e) for e in range(NUM_EXPERTS)], mean_HH, 0))
    used_EJH = written_gate_up(solved.tensors)
    inputs = [reference.gated_activation(layer.tokens(e), used_EJH[e]) for e in range(NUM_EXPERTS)]
    routed_II = reference.moment_sum(torch.cat(inputs)) / layer.expert_TK.numel()
    close(spy.hessians(HIDDEN), expected_moments(inputs, routed_II, 0), rtol=1e-4)
    assert {r.blend_weight for name, r in results(solved).items() if not name.startswith(f"e{NOBODY}.")} == {0.0}
    assert {r.blend_weight for name, r in results(solved).items() if name.startswith(f"e{NOBODY}.")} == {1.0}


def test_layer_hessian_is_one_matrix_for_gate_and_up_of_all_experts(layer: TinyLayer, spy: SpySolver) -> None:
    solved = layer.solve(recipe(hessian="layer", hessian_blend_tokens=4, refinement_passes=1))
    (given, _), (down, _) = spy.calls
    assert given.weight_EOI.shape == (1, NUM_EXPERTS * 2 * INTER, HIDDEN)
    assert given.hessian_EII is not None and down.weight_EOI.shape == (NUM_EXPERTS, HIDDEN, INTER)
    close(given.hessian_EII[0], reference.moment_sum(layer.x_TH) / layer.x_TH.shape[0])
    used_EJH = written_gate_up(solved.tensors)
    inputs = [reference.gated_activation(layer.tokens(e), used_EJH[e]) for e in range(NUM_EXPERTS)]
    routed_II = reference.moment_sum(torch.cat(inputs)) / layer.expert_TK.numel()
    close(spy.hessians(HIDDEN), expected_moments(inputs, routed_II, 4), rtol=1e-4)
    for expert in range(NUM_EXPERTS):
        alone = solve_gptq(SolverBatch(layer.gate_up_EJH[expert : expert + 1].clone(), given.hessian_EII), REFINED)
        expected_JH = reference.dequantize(alone.codes_EOI[0], alone.scale_EOG[0])
        torch.testing.assert_close(used_EJH[expert], expected_JH, rtol=0, atol=0)
        shares = [results(solved)[f"e{expert}.{p}"].blend_weight for p in PROJECTIONS]
        assert shares[:2] == [1.0, 1.0] and shares[2] == pytest.approx(4 / (4 + len(layer.tokens(expert))))


def test_quantized_and_original_gate_up_give_different_hessians(
    layer: TinyLayer, spy: SpySolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer.solve(recipe(propagate_error=True))
    other = SpySolver()
    other.install(monkeypatch)
    layer.solve(recipe(propagate_error=False))
    assert torch.equal(spy.hessians(2 * INTER), other.hessians(2 * INTER))
    change = (spy.hessians(HIDDEN) - other.hessians(HIDDEN)).norm() / other.hessians(HIDDEN).norm()
    assert change > 1e-2


def test_what_is_written_is_what_was_solved(layer: TinyLayer, spy: SpySolver) -> None:
    solved = layer.solve(recipe())
    (_, gate_up), (_, down) = spy.calls
    for expert in range(NUM_EXPERTS):
        parts = {
            "gate_proj": (gate_up, slice(0, INTER)),
            "up_proj": (gate_up, slice(INTER, 2 * INTER)),
            "down_proj": (down, slice(0, HIDDEN)),
        }
        for projection, (batch, rows) in parts.items():
            name = f"e{expert}.{projection}.weight"
            assert torch.equal(reference.unpack(solved.tensors[f"{name}_packed"]), batch.codes_EOI[expert, rows])
            assert torch.equal(solved.tensors[f"{name}_scale"], batch.scale_EOG[expert, rows])
    assert len(solved.tensors) == 3 * 3 * NUM_EXPERTS


@pytest.mark.parametrize("blend_tokens", [0, 64])
@pytest.mark.parametrize("expert", [NOBODY, ONE, TWO])
def test_starved_experts_are_solved_and_not_zeroed(layer: TinyLayer, expert: int, blend_tokens: float) -> None:
    solved = layer.solve(recipe(hessian_blend_tokens=blend_tokens))
    originals = dict(zip(PROJECTIONS, (*layer.gate_up_EJH[expert].chunk(2), layer.down_EHI[expert]), strict=True))
    for projection, original_OI in originals.items():
        written_OI = written_weight(solved.tensors, expert, projection)
        assert bool(torch.isfinite(written_OI).all())
        # Far from zeroed, column by column: 4-bit rounding moves a weight by a tenth of the typical size.
        share_I = (written_OI - original_OI).norm(dim=0) / original_OI.norm(dim=0)
        assert float(share_I.max()) < 0.6
        result = results(solved)[f"e{expert}.{projection}"]
        assert (result.outcome, result.num_tokens) == ("solved", layer.tokens(expert).shape[0])


@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("propagate", [True, False])
def test_output_equals_the_plain_forward(layer: TinyLayer, propagate: bool, passes: int) -> None:
    solved = layer.solve(recipe(propagate_error=propagate, refinement_passes=passes))
    assert solved.output_TH is not None and solved.output_TH.dtype == torch.float32
    written = written_gate_up(solved.tensors), written_down(solved.tensors)
    used = written if propagate else (layer.gate_up_EJH, layer.down_EHI)
    close(solved.output_TH, layer.forward(*used), rtol=1e-5)


def test_a_solved_layer_holds_nothing_but_its_result(layer: TinyLayer) -> None:
    """Tokens of a real layer are 13 GB of a GPU: they must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        capture = replace(layer.capture(), x_TH=layer.x_TH.clone())
        tokens = weakref.ref(capture.x_TH)
        solved = layer.solver(recipe(), capture).solve()
        del capture
        assert solved.results and tokens() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kept_bytes", [0, 2**28])
@pytest.mark.parametrize("chunk_bytes", [1, 2**30])
def test_what_a_layer_holds_goes_when_it_is_used(
    layer: TinyLayer, kept_bytes: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics before the output is made, weights and kept inputs as they are used, means and weights of a chunk."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk_bytes)
    monkeypatch.setitem(KEPT_BYTES, "cpu", kept_bytes)
    loaded: list[weakref.ref[Tensor]] = []
    held: list[int] = []
    real_output, real_load = LayerSolver._output, TinyLayer.expert_down
    real_mean = Capture.layer_mean

    def noted(value: Tensor) -> Tensor:
        loaded.append(weakref.ref(value))
        return value

    def output(self: LayerSolver, capture: Capture) -> Tensor:
        assert not self._down_sums and not self._drift_sums
        assert len(self._gate_up) == len(self._down) == NUM_EXPERTS
        assert bool(self._hidden) == bool(kept_bytes)
        held.append(sum(one() is not None for one in loaded))
        return real_output(self, capture)

    monkeypatch.setattr(LayerSolver, "_output", output)
    monkeypatch.setattr(TinyLayer, "expert_down", lambda self, layer, experts: noted(real_load(self, layer, experts)))
    monkeypatch.setattr(Capture, "layer_mean", lambda self: noted(real_mean(self)))
    solver = layer.solver(recipe(drift_correction=True), layer.capture())
    solver.solve()
    assert loaded and held == [0]
    assert not solver._gate_up and not solver._down and not solver._hidden and not solver._noted


@pytest.mark.parametrize(("report_rows", "step"), [(512, 1), (16, 4)])
def test_results_say_what_happened(
    layer: TinyLayer, spy: SpySolver, report_rows: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are those of every so many-th row of a matrix with many."""
    monkeypatch.setattr(experts_module, "REPORT_ROWS", report_rows)
    solved = layer.solve(recipe(hessian_blend_tokens=8))
    assert sorted(results(solved)) == sorted(f"e{e}.{p}" for e in range(NUM_EXPERTS) for p in PROJECTIONS)
    hessians = {"gate_proj": spy.hessians(2 * INTER), "up_proj": spy.hessians(2 * INTER)}
    hessians["down_proj"] = spy.hessians(HIDDEN)
    for expert in range(NUM_EXPERTS):
        count = layer.tokens(expert).shape[0]
        originals = dict(zip(PROJECTIONS, (*layer.gate_up_EJH[expert].chunk(2), layer.down_EHI[expert]), strict=True))
        for projection, original_OI in originals.items():
            result, hessian_CC = results(solved)[f"e{expert}.{projection}"], hessians[projection][expert]
            assert result.num_tokens == count
            assert result.blend_weight == pytest.approx(8 / (8 + count))
            assert result.dampening_frac == pytest.approx(0.01)
            delta_OI = (written_weight(solved.tensors, expert, projection) - original_OI)[::step]
            original_OI = original_OI[::step]
            whole = reference.output_error(original_OI, hessian_CC)
            error = (reference.output_error(delta_OI, hessian_CC) / whole) ** 0.5
            assert result.relative_output_error == pytest.approx(error, rel=1e-3)
            weight_error = float(delta_OI.norm() / original_OI.double().norm())
            assert result.relative_weight_error == pytest.approx(weight_error, rel=1e-4)


@pytest.mark.parametrize(
    ("parts", "step"),
    [
        ([(0, 2048, 1), (2048, 4096, 1)], 4), ([(0, 6144, 1)], 8), ([(0, 1023, 1)], 1), ([(0, 1024, 1)], 2),
        ([(0, 2050, 1), (2050, 4100, 1)], 2), ([(0, 1537, 1), (1537, 3074, 1)], 1),
    ],
)  # fmt: skip
def test_reported_rows_begin_where_a_projection_does(parts: list[tuple[int, int, int]], step: int) -> None:
    assert report_step(parts) == step


def test_failed_matrices_are_named(layer: TinyLayer) -> None:
    hopeless = recipe(dampening_frac=1e-9, dampening_steps=0, hessian_blend_tokens=0)
    found = results(layer.solve(hopeless))
    # Two tokens and no borrowing: a Hessian of rank two.
    for projection in PROJECTIONS:
        assert found[f"e{TWO}.{projection}"].outcome == "hessian_not_positive_definite"


@pytest.mark.parametrize(
    "changes",
    [
        {"solver": "gptq"},
        {"solver": "rtn"},
        {"solver": "awq"},
        {"propagate_error": False},
        {"hessian": "layer"},
        {"drift_correction": True},
    ],
)
def test_chunks_do_not_change_the_result(
    layer: TinyLayer, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    settings = recipe(**changes)
    whole = layer.solve(settings)
    layer.asked.clear()
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 1)
    cut = layer.solve(settings)
    assert {tuple(asked) for asked in layer.asked} == {(expert,) for expert in range(NUM_EXPERTS)}
    assert whole.tensors.keys() == cut.tensors.keys()
    assert all(torch.equal(tensor, cut.tensors[name]) for name, tensor in whole.tensors.items())
    assert whole.output_TH is not None and cut.output_TH is not None
    close(cut.output_TH, whole.output_TH, rtol=1e-6)
    for name, result in results(whole).items():
        other = results(cut)[name]
        assert (result.outcome, result.num_tokens, result.blend_weight) == (
            other.outcome, other.num_tokens, other.blend_weight,
        )  # fmt: skip
        assert result.relative_weight_error == pytest.approx(other.relative_weight_error, rel=1e-4)


def test_without_data_all_is_rounded(layer: TinyLayer) -> None:
    solved = layer.solve(recipe(solver="rtn"), with_data=False)
    assert solved.output_TH is None
    for result in solved.results:
        assert (result.outcome, result.num_tokens, result.blend_weight) == ("rounded", None, None)
        assert (result.dampening_frac, result.relative_output_error) == (None, None)
        assert 0 < result.relative_weight_error < 0.3
    assert len(solved.results) == 3 * NUM_EXPERTS


def test_inputs_are_not_changed(layer: TinyLayer) -> None:
    kept = layer.x_TH.clone(), layer.gate_up_EJH.clone(), layer.down_EHI.clone(), layer.weight_TK.clone()
    layer.solve(recipe())
    now = layer.x_TH, layer.gate_up_EJH, layer.down_EHI, layer.weight_TK
    assert all(torch.equal(value, before) for value, before in zip(now, kept, strict=True))


def test_inputs_are_kept_from_the_first_expert_on_as_long_as_they_fit() -> None:
    most_tokens = [3, 0, 2, 1]
    assert [num_kept(most_tokens, 10, budget) for budget in (0, 29, 30, 49, 50, 60, 99)] == [0, 0, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("kept", [0, 5000, 2**28])
def test_inputs_of_down_are_computed_again_only_where_they_are_not_kept(
    layer: TinyLayer, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    without = layer.solve(REFINED)
    calls = 0

    def counted(x_TH: Tensor, gate_up_JH: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gated_activation(x_TH, gate_up_JH)

    monkeypatch.setattr(experts_module, "gated_activation", counted)
    monkeypatch.setitem(KEPT_BYTES, "cpu", kept)
    solved = layer.solve(REFINED)
    assert solved.output_TH is not None and without.output_TH is not None
    assert torch.equal(solved.output_TH, without.output_TH)
    again = calls - NUM_EXPERTS
    sizes = [layer.tokens(expert).shape[0] * INTER * layer.x_TH.element_size() for expert in range(NUM_EXPERTS)]
    assert again == sum(total > kept for total in accumulate(sizes))
    assert {0: NUM_EXPERTS, 2**28: 0}.get(kept, again) == again

"""The CUDA path against the CPU path. Needs a GPU: `make test-gpu`."""

from functools import partial
from pathlib import Path

import pytest
import torch

from kvq.calibration.activations import ActivationStore, page_locked
from kvq.checkpoint.source import Source
from kvq.errors import CheckpointError
from kvq.pipeline import prepare, quantize_checkpoint
from kvq.quantize.ahead import LoadingAhead
from kvq.quantize.gptq import solve_gptq
from kvq.quantize.qparams import from_codes
from kvq.quantize.types import SolverBatch
from kvq.recipes.schema import Recipe, load_recipe, override
from kvq.verify.checks import verify_checkpoint
from tests.checkpoints import make_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Silent:
    def stage(self, layer: int | None, num_layers: int, text: str) -> None: ...

    def layer_done(self, layer: int, num_layers: int) -> None: ...


@pytest.mark.parametrize("refinement_passes", [0, 2])
def test_triton_sweep_equals_cpu_sweep(refinement_passes: int) -> None:
    """Same output error, and the same codes but for ties that rounding noise turns."""
    recipe = Recipe(name="test", refinement_passes=refinement_passes)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 512, generator=generator) @ torch.randn(512, 512, generator=generator)
    hessian = (x.T @ x / 2048).expand(3, 512, 512).clone()
    weight = torch.randn(3, 256, 512, generator=generator) * 0.05
    on_cpu = solve_gptq(SolverBatch(weight, hessian), recipe)
    on_gpu = solve_gptq(SolverBatch(weight.cuda(), hessian.cuda()), recipe)
    assert on_gpu.outcomes == on_cpu.outcomes == ("solved",) * 3
    errors = []
    for solved in (on_cpu, on_gpu):
        delta = from_codes(solved.codes_EOI.cpu(), solved.scale_EOG.cpu()) - weight
        errors.append((torch.bmm(delta, hessian) * delta).sum().item())
    assert errors[1] == pytest.approx(errors[0], rel=2e-3)
    assert (on_cpu.codes_EOI == on_gpu.codes_EOI.cpu()).float().mean() > 0.98


@pytest.mark.parametrize(
    ("family", "source"), [("glm_moe_dsa", "fp8_block"), ("glm4_moe", "fp8_channel"), ("kimi_k2", "fp8_block")]
)
def test_whole_run_on_the_gpu(tmp_path: Path, family: str, source: str) -> None:
    folder = make_checkpoint(tmp_path / "source", family, source, block_size=(32, 32))
    settings = ["group_size=32", "num_calibration_samples=8", "max_seq_length=64"]
    recipe = override(load_recipe("int4"), settings)
    prepared = prepare(Source(folder, str(folder)), recipe, tmp_path / "out", device="cuda")
    quantize_checkpoint(prepared, Silent())
    report = verify_checkpoint(tmp_path / "out", folder, lambda done, total: None)
    assert report.passed, report.failure()


@pytest.mark.parametrize("batch_size", [1, 3, 4, 16])
def test_hidden_states_travel_in_order(batch_size: int) -> None:
    """Many layers over one buffer, each reading what the one before wrote, with work that keeps the GPU behind."""
    generator = torch.Generator().manual_seed(0)
    start_NSH = torch.randn(10, 256, 512, generator=generator)
    expected_NSH = start_NSH.clone()
    store = ActivationStore(page_locked(start_NSH.clone()), batch_size)
    device, busy = torch.device("cuda"), torch.randn(2048, 2048, device="cuda")
    for layer in range(8):
        for batch in store.batches():
            hidden_BSH = store.read(batch, device)
            for _ in range(layer % 3):
                busy = (busy @ busy).clamp(-1, 1)
            store.write(batch, hidden_BSH * 1.5 + layer)
            if layer == 3:  # read again what was just written, as an evaluation does
                torch.testing.assert_close(store.read(batch, device).cpu(), expected_NSH[batch] * 1.5 + layer)
        expected_NSH = expected_NSH * 1.5 + layer
        if layer == 5:
            assert torch.equal(store.hidden_NSH, expected_NSH)  # and on with a ferry made anew
    assert torch.equal(store.hidden_NSH, expected_NSH)


def test_weights_are_loaded_beside_the_solver() -> None:
    """Each taken tensor is whole, whatever the other stream does; an error of the loader is the taker's."""
    busy = torch.randn(2048, 2048, device="cuda")

    def load(number: int) -> torch.Tensor:
        if number == 7:
            raise CheckpointError("damaged")
        return torch.full((512, 512), float(number)).cuda() + 0

    with LoadingAhead(torch.device("cuda")) as ahead:
        following = ahead.begin(partial(load, 0))
        for number in range(7):
            taken, following = following, ahead.begin(partial(load, number + 1))
            value = taken()
            busy = (busy @ busy).clamp(-1, 1)
            assert bool((value == number).all())
        with pytest.raises(CheckpointError, match="damaged"):
            following()

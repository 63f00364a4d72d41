"""The CUDA path against the CPU path. Needs a GPU: `make test-gpu`."""

from pathlib import Path

import pytest
import torch

from kvq.checkpoint.source import Source
from kvq.pipeline import prepare, quantize_checkpoint
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

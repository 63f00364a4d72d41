"""Verification of an AWQ output: factors between up and down are undone, and must be inverse."""

from pathlib import Path

import pytest
import torch

from kvq.verify.smoothing import rescaled_original
from tests.checkpoints import edit_tensor
from tests.runs import Shared, manifest_of, rewrite_manifest
from tests.verify.conftest import Verify, failed

EXPERT = "model.layers.2.mlp.experts.3"


@pytest.mark.parametrize("name", ["glm-5", "glm-4.7"])
def test_an_awq_output_passes(shared: Shared, verify: Verify, name: str) -> None:
    assert failed(verify(shared.output(name, "solver=awq"), shared.source(name))) == {}


@pytest.mark.parametrize("projection", ["up_proj", "down_proj"])
def test_factors_of_one_side_only_are_found(shared: Shared, verify: Verify, tmp_path: Path, projection: str) -> None:
    out = shared.copy(shared.output("glm-5", "solver=awq"), tmp_path / "out")

    def doubled(scale_OG: torch.Tensor) -> torch.Tensor:
        return torch.cat([2 * scale_OG[:1], scale_OG[1:]]) if projection == "up_proj" else 2 * scale_OG

    edit_tensor(out, f"{EXPERT}.{projection}.weight_scale", doubled)
    rewrite_manifest(out, manifest_of(out))
    problems = failed(verify(out, shared.source("glm-5")))["packed weights"]
    assert any(problem == f"{EXPERT}.up_proj: up and down of this expert were scaled apart" for problem in problems)


def test_factors_are_read_off_rounded_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    original = {name: torch.randn(24, 24, generator=generator) for name in ("gate_proj", "up_proj", "down_proj")}
    original["up_proj"][4] = 0
    factor_R = torch.exp2(torch.randint(-5, 6, (24,), generator=generator).float())
    factor_R[4] = 1
    scaled = {
        "gate_proj": original["gate_proj"],
        "up_proj": original["up_proj"] / factor_R.unsqueeze(1),
        "down_proj": original["down_proj"] * factor_R,
    }
    written = {
        name: value + 0.15 * value.abs() * torch.randn(24, 24, generator=generator) for name, value in scaled.items()
    }
    for name, value in scaled.items():
        found = rescaled_original(lambda module: (written[module[2:]], original[module[2:]]), f"e.{name}")
        assert found is not None and torch.equal(found, value)

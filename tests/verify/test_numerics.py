"""What only the source can show: experts that are not where they belong, and tensors that are not what they were."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvq.verify.numerics import relative_error
from tests.checkpoints import drop_tensor, edit_tensor, make_checkpoint, shard_of
from tests.runs import CASES, Shared, manifest_of, rewrite_manifest
from tests.verify.conftest import Verify, failed

LAYER = "model.layers.2.mlp.experts"


def exchange(folder: Path, first: str, second: str) -> None:
    """Swap all tensors below two names of one shard, with hashes that fit."""
    shard = shard_of(folder, f"{first}.gate_proj.weight_packed")
    tensors = load_file(shard)
    for name in [name for name in tensors if name.startswith(f"{first}.")]:
        other = name.replace(first, second)
        tensors[name], tensors[other] = tensors[other], tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    rewrite_manifest(folder, manifest_of(folder))


def test_swapped_experts(shared: Shared, damaged: Path, verify: Verify) -> None:
    exchange(damaged, f"{LAYER}.1", f"{LAYER}.6")
    assert verify(damaged).passed  # the files alone are consistent
    problems = failed(verify(damaged, shared.source("glm-5")))
    assert list(problems) == ["packed weights"]
    named = {problem.split(":")[0] for problem in problems["packed weights"]}
    assert named == {f"{LAYER}.{expert}.{p}_proj" for expert in (1, 6) for p in ("gate", "up", "down")}
    assert all("is not INT4 rounding" in problem for problem in problems["packed weights"][::2])


def test_scales_of_the_neighbour(shared: Shared, damaged: Path, verify: Verify) -> None:
    """Smaller than swapped weights, and still far from what was recorded when they were written."""
    other = load_file(shard_of(damaged, f"{LAYER}.1.up_proj.weight_scale"))[f"{LAYER}.1.up_proj.weight_scale"]
    edit_tensor(damaged, f"{LAYER}.0.up_proj.weight_scale", lambda scale: other)
    rewrite_manifest(damaged, manifest_of(damaged))
    (problem,) = failed(verify(damaged, shared.source("glm-5")))["packed weights"]
    assert problem.startswith(f"{LAYER}.0.up_proj: relative weight error is")
    assert "when written it was" in problem


def test_one_group_of_codes_is_off(shared: Shared, damaged: Path, verify: Verify) -> None:
    edit_tensor(damaged, f"{LAYER}.3.down_proj.weight_packed", lambda words: words.index_fill(1, torch.tensor([2]), 0))
    rewrite_manifest(damaged, manifest_of(damaged))
    problems = failed(verify(damaged, shared.source("glm-5")))["packed weights"]
    assert all(problem.startswith(f"{LAYER}.3.down_proj: relative weight error") for problem in problems) and problems


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.0.self_attn.indexer.wk.weight",
        "model.layers.3.eh_proj.weight",
    ],
)
def test_a_changed_kept_tensor(shared: Shared, damaged: Path, verify: Verify, name: str) -> None:
    edit_tensor(damaged, name, lambda value: value + 0.25)
    rewrite_manifest(damaged, manifest_of(damaged))
    (problem,) = failed(verify(damaged, shared.source("glm-5")))["kept tensors"]
    assert problem == f"{name} differs from {name} of the source"


def test_a_changed_fp8_byte(shared: Shared, damaged: Path, verify: Verify) -> None:
    def flip(weight: torch.Tensor) -> torch.Tensor:
        codes = weight.view(torch.uint8).clone()
        codes[3, 7] ^= 0x81  # the sign too, so that 0 and -0 do not pass for equal
        return codes.view(torch.float8_e4m3fn)

    name = "model.layers.2.self_attn.o_proj.weight"
    edit_tensor(damaged, name, flip)
    rewrite_manifest(damaged, manifest_of(damaged))
    assert failed(verify(damaged, shared.source("glm-5"))) == {
        "kept tensors": [f"{name} differs from {name} of the source"]
    }


def test_another_dtype_with_the_same_values(shared: Shared, damaged: Path, verify: Verify) -> None:
    edit_tensor(damaged, "model.norm.weight", lambda value: value.half())
    rewrite_manifest(damaged, manifest_of(damaged))
    assert "kept tensors" in failed(verify(damaged, shared.source("glm-5")))


def test_a_tensor_that_was_left_out(shared: Shared, damaged: Path, verify: Verify) -> None:
    """Not even the plan knew of it."""
    name = "model.layers.0.post_attention_layernorm.weight"
    manifest = manifest_of(damaged)
    manifest["tensors"].pop(name)
    drop_tensor(damaged, name)
    rewrite_manifest(damaged, manifest)
    (problem,) = failed(verify(damaged, shared.source("glm-5")))["kept tensors"]
    assert problem.startswith(f"{name} of the source is in no tensor of")


def test_native_int4_must_be_the_same_bytes(shared: Shared, tmp_path: Path, verify: Verify) -> None:
    folder = shared.copy(shared.output("kimi-k2.5"), tmp_path / "damaged")
    name = "language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed"
    edit_tensor(folder, name, lambda words: words ^ 1)
    rewrite_manifest(folder, manifest_of(folder))
    assert verify(folder).passed
    (problem,) = failed(verify(folder, shared.source("kimi-k2.5")))["kept tensors"]
    assert problem == f"{name} differs from {name} of the source"


@pytest.mark.parametrize("manifest", [True, False])
def test_against_another_model(shared: Shared, damaged: Path, verify: Verify, tmp_path: Path, manifest: bool) -> None:
    """Same architecture, other weights."""
    if not manifest:
        (damaged / "kvq-manifest.json").unlink()
    case = CASES["glm-5"]
    other = make_checkpoint(tmp_path / "other", case.family, case.source, seed=1, **case.options)
    problems = failed(verify(damaged, other))
    assert len([p for p in problems["packed weights"] if "not INT4 rounding" in p]) == 72
    assert "lm_head.weight differs from lm_head.weight of the source" in problems["kept tensors"]


def test_against_another_family(shared: Shared, damaged: Path, verify: Verify) -> None:
    problems = failed(verify(damaged, shared.source("glm-4.7")))
    assert any("self_attn.kv_b_proj" in problem for problem in problems["kept tensors"])


def test_against_a_broken_source(shared: Shared, damaged: Path, verify: Verify, tmp_path: Path) -> None:
    source = shared.copy(shared.source("glm-5"), tmp_path / "source")
    shard_of(source, "lm_head.weight").unlink()
    (problem,) = failed(verify(damaged, source))["source"]
    assert "shards are missing" in problem


def test_worst_modules_come_first(shared: Shared, verify: Verify) -> None:
    worst = verify(shared.output("glm-5"), shared.source("glm-5")).worst_weight_errors
    assert len(worst) == 5 and worst == sorted(worst, key=lambda item: -item[1])
    rows = {row["name"]: row["relative_weight_error"] for row in manifest_of(shared.output("glm-5"))["modules"]}
    assert worst[0][1] == pytest.approx(max(rows.values()), rel=1e-5)


def test_relative_error_by_hand() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 5.0])) == pytest.approx(10**0.5 / 5)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == float("inf")

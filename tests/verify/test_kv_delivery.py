"""The delivery table, and the loading that `kvq verify` emulates with it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvq.checkpoint.architecture import Attention
from kvq.verify.checks import verify_checkpoint
from kvq.verify.kv_check import check_kv_scales
from kvq.verify.kv_delivery import KV_CACHE_SCHEME, TABLE, Target, checkpoint_names, conditions_of, deliveries
from kvq.verify.report import Check
from tests.checkpoints import edit_config, make_checkpoint, rewrite_index

COMPRESSED = frozenset({"compressed-tensors", "kv_cache_scheme"})


def test_every_target_and_attention_has_rows_with_reasons_and_sources() -> None:
    cells = {(row.target, row.attention) for row in TABLE}
    assert cells == {(t, a) for t in ("sglang", "vllm", "transformers") for a in ("gqa", "mla", "dsa")}
    assert {row.version for row in TABLE if row.target == "sglang"} == {"0.5.17", "0.5.23"}
    for row in TABLE:
        assert row.source and (row.verdict == "used") == bool(row.names) and (row.verdict == "used") != bool(row.reason)
        for below in row.names.values():
            assert row.lands_in(below, COMPRESSED), f"{row.engine} would not load what it is given"


@pytest.mark.parametrize(("target", "attention", "names"), [
    ("sglang", "gqa", set()), ("sglang", "mla", set()), ("sglang", "dsa", set()),
    ("vllm", "gqa", {"self_attn.k_scale", "self_attn.v_scale"}), ("vllm", "mla", set()), ("vllm", "dsa", set()),
    ("transformers", "mla", {"self_attn.k_scale", "self_attn.v_scale"}), ("transformers", "dsa", set()),
])  # fmt: skip
def test_only_what_is_used_goes_into_the_checkpoint(target: Target, attention: Attention, names: set[str]) -> None:
    assert set(checkpoint_names(target, attention).values()) == names


def test_sentences_name_the_engine() -> None:
    said = {(row.target, row.attention): row.sentence() for row in TABLE}
    assert said["sglang", "gqa"].startswith("ignored by sglang 0.5.23: Glm4MoeAttention")
    assert said["sglang", "mla"].startswith("withheld: would corrupt (sglang 0.5.23: flashmla")
    assert "scales dynamically" in said["sglang", "dsa"] and "scales dynamically" in said["vllm", "dsa"]
    assert said["vllm", "gqa"] == "used by vllm 0.32.0"


def test_conditions() -> None:
    assert conditions_of(None) == {""}
    assert conditions_of({"quant_method": "fp8"}) == {"fp8"}
    assert conditions_of({"quant_method": "compressed-tensors", "kv_cache_scheme": dict(KV_CACHE_SCHEME)}) == COMPRESSED


@pytest.mark.parametrize(("version", "conditions", "lands"), [
    ("0.5.17", {"fp8"}, True), ("0.5.17", COMPRESSED, False), ("0.5.23", COMPRESSED, True),
    ("0.5.23", {"compressed-tensors"}, False),
])  # fmt: skip
def test_latent_scales_in_sglang(version: str, conditions: set[str], lands: bool) -> None:
    row = next(row for row in deliveries("sglang", "mla") if row.version == version)
    found = row.lands_in("self_attn.k_proj.k_scale", frozenset(conditions))
    assert found == ("self_attn.attn_mqa.k_scale" if lands else None)
    assert row.lands_in("self_attn.k_scale", frozenset(conditions)) is None


def with_scales(folder: Path, family: str, source: str, below: dict[str, float], scheme: bool = False) -> Path:
    """A checkpoint whose first layer has the given scales."""
    make_checkpoint(folder, family, source)
    tensors = {f"model.layers.0.{name}": torch.tensor([value]) for name, value in below.items()}
    save_file(tensors, folder / "scales.safetensors", metadata={"format": "pt"})
    rewrite_index(folder, lambda index: index["weight_map"].update(dict.fromkeys(tensors, "scales.safetensors")))
    if scheme:
        edit_config(folder, lambda c: c["quantization_config"].update(kv_cache_scheme=dict(KV_CACHE_SCHEME)))
    return folder


def check(tmp_path: Path, family: str, source: str, below: dict[str, float], target: Target, scheme: bool) -> Check:
    return check_kv_scales(with_scales(tmp_path / "m", family, source, below, scheme), target)


def test_scales_that_glm_ignores_are_said_and_are_no_problem(tmp_path: Path) -> None:
    found = check(tmp_path, "glm4_moe", "fp8_channel", {"self_attn.k_scale": 0.5}, "sglang", False)
    assert found.passed and "sglang 0.5.17: 0 loaded, 1 ignored, 0 missing" in found.note


def test_a_scale_that_would_corrupt_is_a_problem(tmp_path: Path) -> None:
    below = {"self_attn.k_proj.k_scale": 0.5, "self_attn.v_proj.v_scale": 0.5}
    found = check(tmp_path, "deepseek_v3", "fp8_block", below, "sglang", False)
    assert not found.passed and "would be loaded by sglang 0.5.17 and do harm" in found.problems[0]


def test_verification_looks_at_them_too(tmp_path: Path) -> None:
    """`kvq verify`, and `kvq upload` before it sends anything, judge them by the engine."""
    below = {"self_attn.k_proj.k_scale": 0.5, "self_attn.v_proj.v_scale": 0.5}
    folder = with_scales(tmp_path / "m", "deepseek_v3", "fp8_block", below)
    expected: dict[Target | None, bool] = {None: False, "sglang": False, "vllm": True}
    for target, passed in expected.items():
        report = verify_checkpoint(folder, None, target=target, without_manifest=True)
        assert next(check for check in report.checks if check.name == "KV scales").passed == passed


@pytest.mark.parametrize(("family", "source", "below"), [
    ("glm4_moe", "fp8_channel", "self_attn.attn_mqa.k_scale"),
    ("deepseek_v3", "fp8_block", "self_attn.k_proj.output_scale"),
])  # fmt: skip
def test_a_name_with_which_vllm_does_not_start_is_a_problem(
    tmp_path: Path, family: str, source: str, below: str
) -> None:
    found = check(tmp_path, family, source, {below: 0.5}, "vllm", False)
    said = f"vllm 0.32.0 does not start with model.layers.0.{below}, which it has no place for; remove it"
    assert found.problems[0] == said


def test_a_scale_of_one_does_no_harm(tmp_path: Path) -> None:
    found = check(tmp_path, "deepseek_v3", "fp8_block", {"self_attn.k_proj.k_scale": 1.0}, "sglang", False)
    assert found.passed and "1 loaded" in found.note


def test_missing_scales_of_a_promised_scheme_are_a_problem(tmp_path: Path) -> None:
    below = {"self_attn.k_scale": 0.5, "self_attn.v_scale": 0.5}
    found = check(tmp_path, "glm4_moe", "fp8_channel", below, "vllm", True)
    assert not found.passed and "finds none for model.layers.1.self_attn.attn.k_scale" in found.problems[0]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_none_is_a_problem(tmp_path: Path, bad: float) -> None:
    found = check(tmp_path, "glm4_moe", "fp8_channel", {"self_attn.k_scale": bad}, "sglang", False)
    assert not found.passed and "must be finite and positive" in found.problems[0]


def test_a_checkpoint_without_scales(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", "glm4_moe", "bf16")
    found = check_kv_scales(folder, "sglang")
    assert found.passed and found.num_checked == 0 and "kept at 1.0" in found.note

"""Serving notes: slices of experts must be whole groups, and of shared experts whole FP8 blocks."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvq.checkpoint.source import resolve_source
from kvq.pipeline import prepare
from kvq.publish.parallel import valid_tensor_parallel_sizes
from kvq.publish.serving import serving_notes
from kvq.recipes.plan import QuantPlan
from kvq.recipes.schema import Recipe
from tests.checkpoints import TINY, make_checkpoint
from tests.runs import Shared

# Matrices of two, four and more FP8 blocks: only the experts' 256 columns limit what fits.
WIDE = replace(TINY, hidden_size=128, moe_intermediate_size=256, intermediate_size=2048, num_attention_heads=8,
               q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=128,
               v_head_dim=128)  # fmt: skip


def plan_of(folder: Path, **fields: object) -> QuantPlan:
    recipe = Recipe.model_validate({"name": "r", "group_size": 32, **fields})
    return prepare(resolve_source(str(folder)), recipe, Path("nowhere")).plan


def test_slices_are_whole_groups(shared: Shared) -> None:
    assert valid_tensor_parallel_sizes(plan_of(shared.source("glm-4.7"))) == [1, 2]
    assert valid_tensor_parallel_sizes(plan_of(shared.source("glm-4.7"), group_size=64)) == []  # rows of 64: no kernel
    assert valid_tensor_parallel_sizes(plan_of(shared.source("kimi-k2.5"))) == [1, 2]


def test_blocks_of_the_rest_count_while_they_are_kept(tmp_path: Path) -> None:
    wide = make_checkpoint(tmp_path / "wide", "kimi_k2", dims=WIDE)
    assert valid_tensor_parallel_sizes(plan_of(wide)) == [1, 2]
    assert valid_tensor_parallel_sizes(plan_of(wide, rest="bf16")) == [1, 2, 4, 8]


@pytest.mark.parametrize(("target", "flagged"), [("sglang", True), ("vllm", False)])
def test_flags_are_for_the_engine(shared: Shared, target: str, flagged: bool) -> None:
    notes = serving_notes(plan_of(shared.source("glm-5")), target)
    assert notes["engine"] == target
    assert ("--disable-shared-experts-fusion" in notes["flags"]) == flagged

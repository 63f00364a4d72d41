"""Shipped facts: every alias or a clear refusal, and a generator that gives the tensors of real folders."""

import math
from pathlib import Path

import pytest

from kvq.checkpoint.facts import KnownCheckpoint, known_aliases, known_checkpoint, published_index
from kvq.checkpoint.index import load_index, load_json
from kvq.errors import CheckpointError
from kvq.recipes.models import known_models
from kvq.recipes.plan import resolve_plan
from kvq.recipes.schema import load_recipe
from tests.checkpoints import make_checkpoint, preset

NOT_SHIPPED = ["kimi-k2-0905"]


def test_every_alias_has_facts_or_is_known_to_have_none() -> None:
    assert sorted([*known_aliases(), *NOT_SHIPPED]) == sorted(known_models())


@pytest.mark.parametrize("alias", NOT_SHIPPED)
def test_without_a_source_there_is_no_guess(alias: str) -> None:
    with pytest.raises(CheckpointError, match="facts not shipped: no source for its config was found"):
        known_checkpoint(alias)


@pytest.mark.parametrize("alias", known_aliases())
def test_facts_name_their_sources_and_can_be_planned(alias: str) -> None:
    known, row = known_checkpoint(alias), known_models()[alias]
    assert known.hub == row.hub and known.sources
    index = published_index(known)
    plan = resolve_plan(load_recipe(row.default_recipe), known.config, index)
    assert plan.source.title.split()[0] == row.source.split()[0]
    assert plan.pass_through == (row.recipe == "pass-through")
    assert set(index.warnings) <= set(plan.warnings) and len(index.warnings) == len(known.assumed)


@pytest.mark.parametrize(
    ("family", "source", "mtp_has_embeddings"),
    [
        ("glm_moe_dsa", "fp8_block", False), ("glm_moe_dsa", "bf16", False), ("glm4_moe", "fp8_channel", True),
        ("kimi_k2", "fp8_block", False), ("deepseek_v3", "bf16", False), ("kimi_k2", "int4", False),
    ],
)  # fmt: skip
def test_the_tensors_of_a_folder_follow_from_its_config(
    tmp_path: Path, family: str, source: str, mtp_has_embeddings: bool
) -> None:
    folder = make_checkpoint(tmp_path / "model", family, source, preset("glm-5.2"))
    config, real = load_json(folder / "config.json"), load_index(folder)
    mtp_has_embeddings = any(".shared_head.head." in name for name in real.tensors)
    known = KnownCheckpoint("tiny", "owner/tiny", config, (), (), {}, mtp_has_embeddings)
    made = published_index(known)
    wanted = {name: (info.dtype, info.shape) for name, info in real.tensors.items()}
    got = {name: (info.dtype, info.shape) for name, info in made.tensors.items()}
    if source == "int4":  # the published files keep weight_shape in 32 bits
        wanted = {
            name: ("I32" if name.endswith("weight_shape") else dtype, shape) for name, (dtype, shape) in wanted.items()
        }
    assert got == wanted


def test_bytes_are_those_of_dtype_and_shape() -> None:
    widths = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4}
    for info in published_index(known_checkpoint("kimi-k2.6")).tensors.values():
        assert info.nbytes == math.prod(info.shape) * widths[info.dtype]

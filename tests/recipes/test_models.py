"""models.yaml: every alias leads to a model that exists and a recipe that fits."""

import re

import pytest
from pydantic import ValidationError

from kvq.checkpoint.architecture import ARCHITECTURES
from kvq.recipes.models import PASS_THROUGH, KnownModel, known_models
from kvq.recipes.schema import library_names, load_recipe

ALIASES = list(known_models())
# Width of the routed experts in the published config.json; every slice at TP 8 must be whole groups.
EXPERT_WIDTH = {"glm-5": 2048, "glm-4": 1536, "kimi": 2048}


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_has_a_valid_recipe(alias: str) -> None:
    model = known_models()[alias]
    assert model.recipe in (*library_names(), PASS_THROUGH)
    assert load_recipe(model.default_recipe).name == model.default_recipe


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_names_a_repository_and_what_it_holds(alias: str) -> None:
    model = known_models()[alias]
    assert re.fullmatch(r"(zai-org|moonshotai)/[A-Za-z0-9.-]+", model.hub)
    assert "/" not in alias and alias == alias.lower()
    assert ("INT4" in model.source) == (model.recipe == PASS_THROUGH)


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if known_models()[alias].recipe != PASS_THROUGH])
def test_default_group_size_divides_the_experts_at_tp_8(alias: str) -> None:
    width = next(width for start, width in EXPERT_WIDTH.items() if alias.startswith(start))
    assert width // 8 % load_recipe(known_models()[alias].default_recipe).group_size == 0


def test_no_two_aliases_of_one_repository() -> None:
    hubs = [model.hub for model in known_models().values()]
    assert len(set(hubs)) == len(hubs)


def test_pass_through_has_a_recipe_for_the_manifest() -> None:
    assert known_models()["kimi-k2.5"].recipe == PASS_THROUGH
    assert known_models()["kimi-k2.5"].default_recipe == "int4"
    assert known_models()["glm-4.7"].default_recipe == "int4-g64"


def test_a_row_is_strict() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        KnownModel.model_validate({"hub": "a/b", "source": "x", "recipe": "int4", "note": "x"})


def test_aliases_are_no_model_types() -> None:
    assert not set(ALIASES) & set(ARCHITECTURES)

"""The models that kvq knows by a short name."""

from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict

PASS_THROUGH = "pass-through"


class KnownModel(BaseModel):
    """A row of models.yaml. `recipe` is a name of the library, or `pass-through` for models trained in INT4."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hub: str
    source: str
    recipe: str

    @property
    def default_recipe(self) -> str:
        return "int4" if self.recipe == PASS_THROUGH else self.recipe


def known_models() -> dict[str, KnownModel]:
    """Alias -> model, in the order of the file."""
    text = (resources.files("kvq.recipes") / "models.yaml").read_text(encoding="utf-8")
    return {alias: KnownModel.model_validate(row) for alias, row in yaml.safe_load(text).items()}

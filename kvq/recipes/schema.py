"""Recipe: strict, frozen data. All numerics come from here, so the hash of a recipe identifies a result."""

import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvq.errors import RecipeError

LIBRARY = resources.files("kvq.recipes") / "library"


class Recipe(BaseModel):
    """One way to quantize the routed experts. The strings under the fields are their documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Equals the file name in the library; goes into the output's name, the manifest and the card."""
    solver: Literal["gptq", "rtn"] = "gptq"
    """gptq corrects each column's rounding error in the columns after it; rtn rounds to nearest and needs no data."""
    num_bits: Literal[4] = 4
    """Bits per weight of the routed experts."""
    group_size: Literal[32, 64, 128] = 128
    """Consecutive input columns that share one BF16 scale."""
    symmetric: Literal[True] = True
    """No zero points: SGLang's INT4 experts cannot load them."""
    scale_search: Literal["minmax", "mse"] = "mse"
    """mse tries shrunken scales and keeps the one with the least (activation-weighted) squared error."""
    actorder: Literal["static"] | None = "static"
    """static solves the columns with the largest activations first; nothing of it is stored."""
    block_size: Literal[32, 64, 128, 256] = 128
    """Columns per block of the GPTQ sweep. A matter of speed, not of the result (up to float rounding)."""
    dampening_frac: float = Field(default=0.03, gt=0, le=1)
    """Added to the Hessian's diagonal, as a fraction of its mean."""
    dampening_steps: int = Field(default=3, ge=0, le=8)
    """How often the dampening is multiplied by ten when a Hessian is not positive definite, before round-to-nearest."""
    refinement_passes: int = Field(default=2, ge=0, le=16)
    """How often scales are refitted and codes reconsidered after the sweep, under the same Hessian."""
    hessian_blend_tokens: float = Field(default=256, ge=0)
    """Weight of the layer-wide Hessian in an expert's own: b / (b + tokens of the expert)."""
    propagate_error: bool = True
    """Later layers are calibrated on what the quantized earlier layers give out."""
    max_fallback_frac: float = Field(default=0.01, ge=0, le=1)
    """Share of modules that may end as round-to-nearest after a failed factorization before the run fails."""
    mtp: Literal["gptq", "rtn"] = "gptq"
    """Solver for the multi-token-prediction layer's experts: with its own forward pass, or without data."""
    rest: Literal["keep", "bf16"] = "keep"
    """What is not a routed expert: FP8 bytes as they are, or dequantized to BF16."""
    kv_scales: Literal["calibrate", "none"] = "calibrate"
    """calibrate gathers FP8 KV-cache scales in the same pass. They go beside the checkpoint; into it only where every
    listed version of the target uses them rightly."""
    num_calibration_samples: int = Field(default=512, ge=1)
    """Sequences at most; the data may hold fewer."""
    max_seq_length: int = Field(default=2048, ge=8)
    """Tokens per sequence. Samples are packed without padding."""

    @property
    def needs_calibration(self) -> bool:
        return self.solver == "gptq"

    @property
    def sha256(self) -> str:
        """Hash over all fields, defaults included."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def library_names() -> list[str]:
    """Names of the recipes that ship with kvq."""
    return sorted(item.name.removesuffix(".yaml") for item in LIBRARY.iterdir() if item.name.endswith(".yaml"))


def load_recipe(name_or_file: str) -> Recipe:
    """A recipe of the library by name, or from a YAML file. Raises RecipeError that names the field."""
    if name_or_file in library_names():
        return _parse((LIBRARY / f"{name_or_file}.yaml").read_text(encoding="utf-8"), f"{name_or_file}.yaml")
    path = Path(name_or_file)
    if not path.is_file():
        raise RecipeError(f"{name_or_file}: no such recipe or file. The library has {', '.join(library_names())}.")
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error}).") from None


def override(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """A changed copy: `key=value` each, the value read as YAML. The name says that it was changed."""
    values: dict[str, Any] = recipe.model_dump()
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key not in values or key == "name":
            keys = ", ".join(key for key in values if key != "name")
            raise RecipeError(f"--set {setting}: expected key=value with one of {keys}.")
        try:
            values[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise RecipeError(f"--set {setting}: {text!r} is not a YAML value.") from None
    changed = _validate(values, "--set")
    base = recipe.name.removesuffix("-modified")
    return recipe if changed == recipe else changed.model_copy(update={"name": f"{base}-modified"})


def _parse(text: str, place: str) -> Recipe:
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{place}: not valid YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{place}: expected a mapping of recipe fields, found {type(values).__name__}.")
    return _validate(values, place)


def _validate(values: dict[str, Any], place: str) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "recipe"
        raise RecipeError(f"{place}: {field}: {first['msg']} (found {first['input']!r}).") from None

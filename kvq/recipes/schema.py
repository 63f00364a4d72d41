"""Recipe: strict, frozen data. All numerics come from here, so the hash of a recipe identifies a result."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from kvq.errors import RecipeError

MAX_RECIPE_BYTES = 64 * 1024
MAX_TOKENS = 1e9  # as a weight in float32; more would change nothing, or overflow
LIBRARY = resources.files("kvq.recipes") / "library"


class Gates(BaseModel):
    """What an output must keep to be called good; `kvq evaluate` measures it. None or an empty table: no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    max_mean_kl: float | None = Field(default=None, ge=0, le=1e6)
    """Mean KL divergence to the source in nats, at most."""
    min_same_top: float | None = Field(default=None, ge=0, le=1)
    """Share of positions with the same most likely token, at least."""
    max_ppl_ratio: float | None = Field(default=None, gt=0, le=1e6)
    """PPL(Q) / PPL(base), at most."""
    min_recovery: dict[str, Annotated[float, Field(ge=0, le=1000)]] = Field(default_factory=dict)
    """Task -> percent of the source's score, at least."""


class Recipe(BaseModel):
    """One way to quantize the routed experts. The strings under the fields are their documentation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Equals the file name in the library; goes into the output's name, the manifest and the card."""
    solver: Literal["gptq", "awq", "rtn"] = "gptq"
    """gptq corrects each column's rounding error in the columns after it; awq rescales between up and down of each
    expert, clips and rounds; rtn rounds to nearest and needs no data."""
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
    sweep: Literal["ldl", "llmcompressor"] = "ldl"
    """Who goes over the columns: kvq, with one factorization of the Hessian, or llm-compressor's `quantize_weight`.
    Both give the same codes but for ties in rounding; kvq's takes less than half the time."""
    block_size: Literal[32, 64, 128, 256] = 128
    """Columns per block of the GPTQ sweep. A matter of speed, not of the result (up to float rounding)."""
    dampening_frac: float = Field(default=0.03, ge=1e-9, le=1)
    """Added to the Hessian's diagonal, as a fraction of its mean."""
    dampening_steps: int = Field(default=3, ge=0, le=8)
    """How often the dampening is multiplied by ten when a Hessian is not positive definite, before round-to-nearest."""
    refinement_passes: int = Field(default=2, ge=0, le=16)
    """How often scales are refitted and codes reconsidered after the sweep, under the same Hessian."""
    hessian: Literal["blend", "routed", "layer"] = "blend"
    """Second moments of an expert's inputs: of its own tokens with some of the layer's, of its own tokens alone, or
    one for the layer (for gate and up; down as with blend)."""
    hessian_blend_tokens: float = Field(default=256, ge=0, le=MAX_TOKENS)
    """Weight of the layer-wide Hessian in an expert's own: b / (b + tokens of the expert)."""
    drift_correction: bool = True
    """down is solved for the outputs that it gave on what the source's gate and up make of the same tokens."""
    drift_dampening_tokens: float = Field(default=500, ge=0, le=MAX_TOKENS)
    """How little the correction believes an expert with few tokens: d / tokens is added to dampening_frac in it."""
    propagate_error: bool = True
    """Later layers are calibrated on what the quantized earlier layers give out."""
    max_fallback_frac: float = Field(default=0.01, ge=0, le=1)
    """Share of modules that may end as round-to-nearest after a failed factorization before the run fails."""
    mtp: Literal["gptq", "rtn"] = "gptq"
    """Solver for the multi-token-prediction layer's experts: with its own forward pass, or without data."""
    rest: Literal["keep", "bf16"] = "keep"
    """What is not a routed expert: FP8 bytes as they are, or dequantized to BF16."""
    kv_scales: Literal["calibrate", "none"] = "none"
    """calibrate gathers FP8 KV-cache scales in the same pass. They go beside the checkpoint; into it only where every
    listed version of the target uses them rightly."""
    num_calibration_samples: int = Field(default=512, ge=1, le=10_000_000)
    """Sequences at most; the data may hold fewer."""
    max_seq_length: int = Field(default=2048, ge=8, le=10_000_000)
    """Tokens per sequence. Samples are packed without padding."""
    gates: Gates | None = None
    """Limits for `kvq evaluate`. They judge a result and do not change it, so they are no part of the hash."""

    @field_validator("num_bits", "group_size", "block_size", "symmetric", mode="before")
    @classmethod
    def _of_its_own_type(cls, value: Any, field: ValidationInfo) -> Any:
        """A choice is met by its own type only: 32.0 is no group size, 1 is no yes, though they are equal."""
        kind = bool if field.field_name == "symmetric" else int
        if isinstance(value, int | float) and type(value) is not kind:
            raise ValueError(f"expected {'true' if kind is bool else 'a whole number'}")
        return value

    @property
    def needs_calibration(self) -> bool:
        return self.solver != "rtn"

    @property
    def sha256(self) -> str:
        """Hash over all fields that a result depends on, defaults included."""
        text = json.dumps(self.model_dump(mode="json", exclude={"gates"}), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def library_names() -> list[str]:
    """Names of the recipes that ship with kvq."""
    return sorted(item.name.removesuffix(".yaml") for item in LIBRARY.iterdir() if item.name.endswith(".yaml"))


def load_recipe(name_or_file: str) -> Recipe:
    """A recipe of the library by name, or from a YAML file. Raises RecipeError that names the field."""
    if name_or_file in library_names():
        return _parse((LIBRARY / f"{name_or_file}.yaml").read_text(encoding="utf-8"), f"{name_or_file}.yaml")
    path = Path(os.path.expanduser(name_or_file))
    if not path.is_file():
        raise RecipeError(f"{name_or_file}: no such recipe or file. The library has {', '.join(library_names())}.")
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(
                f"{path}: has {path.stat().st_size} bytes; a recipe is a page of YAML. Give another file."
            )
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
            values[key] = _read_yaml(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise RecipeError(f"--set {setting}: {text!r} is not a YAML value.") from None
    changed = _validate(values, "--set")
    base = recipe.name.removesuffix("-modified")
    return recipe if changed == recipe else changed.model_copy(update={"name": f"{base}-modified"})


def make_gates(
    max_mean_kl: float | None, min_same_top: float | None, max_ppl_ratio: float | None, min_recovery: Sequence[str]
) -> Gates:
    """Gates of the command line; a task's limit is `TASK=PERCENT`. Raises RecipeError."""
    recovery: dict[str, float] = {}
    for setting in min_recovery:
        task, _, percent = setting.partition("=")
        try:
            recovery[task] = float(percent)
        except ValueError:
            raise RecipeError(f"--min-recovery {setting}: expected TASK=PERCENT, for example gsm8k=98.5.") from None
    values = {"max_mean_kl": max_mean_kl, "min_same_top": min_same_top, "max_ppl_ratio": max_ppl_ratio}
    return make_gates_from({**values, "min_recovery": recovery}, "gates")


def make_gates_from(values: Any, place: str) -> Gates:
    """Gates from plain data. Raises RecipeError that names the field."""
    try:
        return Gates.model_validate(values)
    except ValidationError as error:
        raise RecipeError(_first_error(error, place, "gates", Gates)) from None


def _parse(text: str, place: str) -> Recipe:
    try:
        values = _read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{place}: not valid YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{place}: expected a mapping of recipe fields, found {type(values).__name__}.")
    return _validate(values, place)


class _PlainLoader(yaml.SafeLoader):
    """YAML as a recipe needs it. Aliases (which can stand for billions of values), tags, merged and repeated keys are
    refused."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None or getattr(event, "tag", None) is not None:
            raise yaml.composer.ComposerError(None, None, "found an alias, an anchor or a tag", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.constructor.ConstructorError(None, None, "found a merged mapping", node.start_mark)
        names = [key.value for key, _ in node.value]
        twice = [name for name, count in Counter(map(str, names)).items() if count > 1]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 5e-2 for a text, as it has no dot.
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+([.][0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _read_yaml(text: str) -> Any:
    """Raises YAMLError, ValueError or RecursionError for what is no plain YAML."""
    return yaml.load(text, _PlainLoader)


def _validate(values: dict[str, Any], place: str) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(_first_error(error, place, "recipe", Recipe)) from None


def _first_error(error: ValidationError, place: str, whole: str, kind: type[BaseModel]) -> str:
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"])) or whole
    if first["type"] == "extra_forbidden":
        known = (Gates if first["loc"][0] == "gates" else kind).model_fields
        return f"{place}: {field}: there is no such field; there are {', '.join(known)}."
    return f"{place}: {field}: {first['msg']} (found {repr(first['input'])[:200]})."

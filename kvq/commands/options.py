"""What commands share: the options' types, how a model and a recipe are named, and how JSON is printed."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvq.errors import RecipeError

if TYPE_CHECKING:
    from kvq.calibration.rows import Place
    from kvq.recipes.models import KnownModel
    from kvq.recipes.schema import Recipe

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


def user_path(text: str) -> Path:
    """A path as people type it: `~` is the home folder also after `--out=`, where no shell sees to it."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(os.path.expanduser(text))


def path_argument(text: str) -> Any:
    return typer.Argument(parser=user_path, metavar="FOLDER", help=text)


def path_option(text: str, metavar: str = "PATH") -> Any:
    return typer.Option(parser=user_path, metavar=metavar, help=text)


def user_data(text: str) -> "Place":
    """Calibration data as people name it: `hf://...`, or a path. Raises RecipeError for another scheme."""
    from kvq.calibration.rows import data_place

    if not text:
        raise RecipeError("--calibration or --held-out: the path is empty. Give one, or leave the option out.")
    return data_place(text) if "://" in text else user_path(text)


Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def chosen_recipe(
    w: str | None, recipe: str | None, settings: list[str] | None, known: "KnownModel | None"
) -> "Recipe":
    from kvq.recipes.schema import load_recipe, override

    if w is not None and recipe is not None:
        raise RecipeError("--w and --recipe both name a recipe; give one of them.")
    return override(load_recipe(w or recipe or (known.default_recipe if known else "int4")), settings or [])


def known_model(model: str) -> "KnownModel | None":
    """The row of an alias. A folder of that name comes first, as it does before a Hub id."""
    from kvq.checkpoint.source import local_folder
    from kvq.recipes.models import known_models

    return None if local_folder(model) is not None else known_models().get(model)


def unaliased(model: str) -> str:
    """The Hub id that an alias stands for; a folder or a Hub id as it is."""
    known = known_model(model)
    return model if known is None else known.hub


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))

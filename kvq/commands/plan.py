"""`kvq plan`: what a recipe would do, before anything is read."""

from typing import Annotated, Literal

import typer

from kvq.commands.options import Json, chosen_recipe, known_model, print_json
from kvq.errors import RecipeError


def plan(
    model: Annotated[str, typer.Argument(help="Folder, alias (planned offline, from shipped facts) or Hub id.")],
    recipes: Annotated[list[str] | None, typer.Argument(help="With --compare: recipes to put side by side.")] = None,
    w: Annotated[str | None, typer.Option("--w", help="Recipe of the library.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe by name or YAML file.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change one recipe field: key=value.")] = None,
    gpu: Annotated[str, typer.Option(help="GPU that will serve: h100, h200, b200, b200-192, mi300x.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that will serve.")] = 8,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size; by default all GPUs.")] = None,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel size, within TP.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel attention groups, within TP.")] = 1,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a request, prompt and answer.")] = None,
    kv_dtype: Annotated[
        Literal["bf16", "fp8_e4m3"] | None, typer.Option(help="KV cache; by default both are shown.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Put the recipes named after MODEL side by side.")] = False,
    ranks: Annotated[int, typer.Option(min=1, help="Processes that would make it together (torchrun).")] = 1,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the run would use.")] = "cuda",
    target: Annotated[Literal["sglang", "vllm"], typer.Option(help="Engine for the serving notes.")] = "sglang",
    revision: Annotated[str | None, typer.Option(help="Hub revision; by default the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a recipe would do, and what serving and running it would take. Reads no weights."""
    import gc

    gc.disable()  # half a million small objects that all stay until the end: collecting takes a third of the time
    from kvq.checkpoint.metadata import read_metadata
    from kvq.console.transfer import TransferLines
    from kvq.publish.gpus import find_gpu
    from kvq.publish.parallel import Parallel
    from kvq.publish.plan_report import comparison_row, plan_report
    from kvq.publish.sizing import make_deployment
    from kvq.recipes.plan import resolve_plan

    names = _compared(recipes, compare, w, recipe)
    known, kind, parallel = known_model(model), find_gpu(gpu), Parallel(tp or gpus, ep, dp)
    chosen = [chosen_recipe(name, None, set_, known) for name in names] or [chosen_recipe(w, recipe, set_, known)]
    note = TransferLines(quiet=as_json).note
    metadata = read_metadata(model, revision, alias=known is not None, note=note)
    rows = []
    for one in chosen:
        resolved = resolve_plan(one, metadata.config, metadata.index, ranks)
        deployment = make_deployment(kind, gpus, parallel, context, kv_dtype, resolved.facts.max_positions)
        report = plan_report(metadata, resolved, deployment, device, target)
        rows.append(comparison_row(report) if compare else report)
    if as_json:
        print_json(rows if compare else rows[0])
        return
    from kvq.console import show_comparison, show_plan_report

    if compare:
        show_comparison(rows)
    else:
        show_plan_report(rows[0])


def _compared(recipes: list[str] | None, compare: bool, w: str | None, recipe: str | None) -> list[str]:
    """Recipes to compare; empty for a plan of one."""
    names = recipes or []
    if compare and (len(names) < 2 or w or recipe):
        raise RecipeError("--compare takes two recipes or more after MODEL, and no --w or --recipe.")
    if names and not compare:
        raise RecipeError(f"unexpected {' '.join(names)}: recipes after MODEL need --compare; --w names a single one.")
    return names

"""`kvq quantize`: the main job."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvq.commands.options import Device, Json, chosen_recipe, known_model, print_json
from kvq.stop import StopRequest

if TYPE_CHECKING:
    from kvq.recipes.schema import Recipe


def quantize(
    model: Annotated[str, typer.Argument(help="Folder, Hub id (owner/name) or alias; `kvq models` lists the aliases.")],
    w: Annotated[
        str | None, typer.Option("--w", help="Recipe of the library: int4, int4-g64, int4-g32, int4-rtn.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe by name or YAML file.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change one recipe field: key=value.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="JSON lines; without it the set that ships with kvq.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder; by default named after model and recipe.")] = None,
    device: Device = "auto",
    target: Annotated[
        Literal["sglang", "vllm", "transformers"],
        typer.Option(help="Engine that the serving notes and KV scales are for."),
    ] = "sglang",
    revision: Annotated[
        str | None, typer.Option(help="Hub revision; by default the newest, recorded as a commit.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, read no weights, write nothing.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what an unfinished run left; begin anew.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Quantize the routed experts to INT4 and keep everything else as it is."""
    from kvq.checkpoint.source import resolve_source
    from kvq.console import ERR, OUT, RunProgress, plan_dict, show_plan, show_result

    known = known_model(model)
    chosen = chosen_recipe(w, recipe, set_, known)
    if dry_run and not Path(model).expanduser().is_dir():
        folder = out or Path(f"{model.rsplit('/', 1)[-1]}-{chosen.name}")
        _dry_run_from_hub(known.hub if known else model, revision, chosen, folder, as_json)
        return
    started = time.monotonic()
    _check_before_download(chosen, calibration, out, device)
    source = resolve_source(known.hub if known else model, revision)
    folder = out or Path(f"{model if known else source.name}-{chosen.name}")

    from kvq.pipeline import peak_memory, prepare, quantize_checkpoint

    prepared = prepare(source, chosen, folder, device=device, target=target, calibration=calibration)
    if not as_json:
        show_plan(prepared.plan, folder, OUT if dry_run else ERR)
    if dry_run:
        if as_json:
            print_json(plan_dict(prepared.plan, folder))
        return
    with StopRequest() as stop, RunProgress(quiet=as_json) as progress:
        manifest = quantize_checkpoint(prepared, progress, restart=restart, stop=stop)
    seconds = time.monotonic() - started
    peak = peak_memory(prepared.device)
    if as_json:
        report = {key: value for key, value in manifest.items() if key not in ("tensors", "files", "modules")}
        print_json({"out": str(folder), "seconds": round(seconds, 3), **peak, **report})
    else:
        show_result(manifest, folder, seconds, peak)
        typer.echo(str(folder))


def _dry_run_from_hub(repo: str, revision: str | None, recipe: "Recipe", out: Path, as_json: bool) -> None:
    """The plan of a Hub model from its headers: nothing is downloaded."""
    from kvq.checkpoint.metadata import read_metadata
    from kvq.checkpoint.writer import check_output
    from kvq.console import OUT, plan_dict, show_plan
    from kvq.recipes.plan import resolve_plan

    metadata = read_metadata(repo, revision)
    plan = resolve_plan(recipe, metadata.config, metadata.index)
    check_output(out, plan.output_bytes)
    if as_json:
        print_json(plan_dict(plan, out))
    else:
        show_plan(plan, out, OUT)


def _check_before_download(recipe: "Recipe", calibration: Path | None, out: Path | None, device: str) -> None:
    """A Hub model may be 700 GB: what can be refused without it is refused first."""
    from kvq.calibration.dataset import read_rows
    from kvq.calibration.forward import pick_device
    from kvq.checkpoint.writer import check_output

    pick_device(device)
    if recipe.needs_calibration:
        read_rows(calibration)
    if out is not None:
        check_output(out, 0)

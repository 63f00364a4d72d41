"""`kvq quantize`: the main job."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvq.commands.options import Device, Json, chosen_recipe, known_model, path_option, print_json, unaliased, user_data
from kvq.errors import OutputError
from kvq.stop import StopRequest

if TYPE_CHECKING:
    from kvq.calibration.rows import Place
    from kvq.publish.coverage import Coverage
    from kvq.publish.events import EventLog
    from kvq.recipes.schema import Recipe
    from kvq.run import Prepared


def quantize(
    model: Annotated[str, typer.Argument(help="Folder, Hub id (owner/name) or alias; `kvq models` lists the aliases.")],
    w: Annotated[
        str | None, typer.Option("--w", help="Recipe of the library: int4, int4-g64, int4-g32, int4-awq, int4-rtn.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe by name or YAML file.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change one recipe field: key=value.")] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="JSON lines, Parquet, text, a folder of these, or hf://datasets/OWNER/NAME[:SPLIT]; "
            "without it the set that ships with kvq."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        path_option("Output folder; by default named after model and recipe.", "FOLDER"),
    ] = None,
    device: Device = "auto",
    target: Annotated[
        Literal["sglang", "vllm", "transformers"],
        typer.Option(help="Engine that the serving notes and KV scales are for."),
    ] = "sglang",
    revision: Annotated[
        str | None, typer.Option(help="Hub revision; by default the newest, recorded as a commit.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, check given data, read no weights, write nothing.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what an unfinished run left; begin anew.")
    ] = False,
    events: Annotated[
        Path | None, path_option("Append what happens to this file, as JSON lines; docs/events.md.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Quantize the routed experts to INT4 and keep everything else as it is."""
    from kvq.checkpoint.source import local_folder, resolve_source
    from kvq.console.transfer import TransferLines

    known = known_model(model)
    chosen = chosen_recipe(w, recipe, set_, known)
    if dry_run and local_folder(model) is None:
        folder = out or Path(f"{model.rsplit('/', 1)[-1]}-{chosen.name}")
        _dry_run_from_hub(unaliased(model), revision, chosen, folder, as_json)
        return
    from kvq.publish.events import open_events, planned_event
    from kvq.ranks import join

    started = time.monotonic()
    _check_events(events, source=local_folder(model), output=out)
    ranks, device = join(device)
    with open_events(None if dry_run or not ranks.first else events, "quantize") as log:
        data = user_data(calibration) if calibration is not None else None
        _check_before_download(chosen, data, out, device)
        log.emit("source_wanted", model=model, revision=revision)
        lines = TransferLines(quiet=as_json)
        source = resolve_source(unaliased(model), revision, lines.note, lines.checked)
        folder = out or Path(f"{model if known else source.name}-{chosen.name}")
        _check_events(events, output=folder)

        from kvq.console import ERR, OUT, plan_dict, show_plan
        from kvq.pipeline import load_calibration, prepare

        prepared = prepare(source, chosen, folder, device=device, target=target, calibration=data, ranks=ranks)
        if dry_run and data is not None:
            load_calibration(prepared)
        if not as_json and ranks.first:
            show_plan(prepared.plan, folder, OUT if dry_run else ERR)
        if dry_run:
            if as_json and ranks.first:
                print_json(plan_dict(prepared.plan, folder))
            return
        log.emit("planned", **planned_event(source, prepared.plan, folder))
        _run(prepared, log, started, restart=restart, as_json=as_json)


def _run(prepared: "Prepared", log: "EventLog", started: float, *, restart: bool, as_json: bool) -> None:
    from kvq.console import RunProgress
    from kvq.pipeline import peak_memory, quantize_checkpoint
    from kvq.publish.coverage import write_coverage

    ranks, folder = prepared.ranks, prepared.out
    # To the end: where the output is whole, a signal must not make a failure of it, for it cannot be run again.
    with StopRequest() as stop:
        with RunProgress(quiet=as_json or not ranks.first) as progress:
            manifest = quantize_checkpoint(prepared, log.beside(progress), restart=restart, stop=stop)
        ranks.leave()
        if not ranks.first:
            return
        coverage = None if prepared.plan.pass_through else write_coverage(folder)
        seconds, peak = time.monotonic() - started, peak_memory(prepared.device)
        log.emit("run_finished", exit_code=0, out=str(folder), **peak, summary=manifest["summary"])
        _show(manifest, folder, seconds, peak, coverage, as_json)


def _show(
    manifest: dict[str, Any], folder: Path, seconds: float, peak: dict[str, int | None],
    coverage: "Coverage | None", as_json: bool,
) -> None:  # fmt: skip
    from kvq.console import ERR, show_result

    if as_json:
        report = {key: value for key, value in manifest.items() if key not in ("tensors", "files", "modules")}
        files = None if coverage is None else coverage.as_dict()
        print_json({"out": str(folder), "seconds": round(seconds, 3), **peak, **report, "coverage": files})
    else:
        show_result(manifest, folder, seconds, peak)
        if coverage is not None:
            ERR.print(f"coverage: {coverage.path}; {coverage.note or ', '.join(coverage.plots)}")
        typer.echo(str(folder))


def _dry_run_from_hub(repo: str, revision: str | None, recipe: "Recipe", out: Path, as_json: bool) -> None:
    """The plan of a Hub model from its headers: nothing is downloaded."""
    from kvq.checkpoint.metadata import read_metadata
    from kvq.checkpoint.writer import check_output
    from kvq.console import OUT, plan_dict, show_plan
    from kvq.console.transfer import TransferLines
    from kvq.recipes.plan import resolve_plan
    from kvq.shares import launched

    rank, size = launched()
    metadata = read_metadata(repo, revision, note=TransferLines(quiet=as_json).note)
    plan = resolve_plan(recipe, metadata.config, metadata.index, size)
    check_output(out, plan.output_bytes)
    if rank:
        return
    if as_json:
        print_json(plan_dict(plan, out))
    else:
        show_plan(plan, out, OUT)


def _check_events(events: Path | None, **folders: Path | None) -> None:
    """The log is no part of a checkpoint: in the source it would be copied while it is written."""
    for name, folder in folders.items():
        if events is not None and folder is not None and events.resolve().is_relative_to(folder.resolve()):
            raise OutputError(f"--events {events}: lies inside the {name} {folder}. Choose another file.")


def _check_before_download(recipe: "Recipe", calibration: "Place | None", out: Path | None, device: str) -> None:
    """A Hub model may be 700 GB: what can be refused without it is refused first."""
    from kvq.calibration.dataset import check_rows
    from kvq.calibration.forward import pick_device
    from kvq.checkpoint.writer import check_output

    pick_device(device)
    if recipe.needs_calibration:
        check_rows(calibration)
    if out is not None:
        check_output(out, 0)

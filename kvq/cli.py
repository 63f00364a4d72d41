"""The command line: parse, call one function, print. Heavy imports stay inside the commands."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvq import __version__
from kvq.errors import KvqError, OutputError, RecipeError, VerificationError
from kvq.stop import StopRequest

if TYPE_CHECKING:
    from kvq.recipes.models import KnownModel
    from kvq.recipes.schema import Recipe

INTERRUPTED = 130
OUT_OF_MEMORY = 9
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(
    "Offline quantization for GLM and Kimi mixture-of-experts checkpoints: FP8 in, checked INT4 experts out."
))  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvq {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
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
        Literal["sglang", "vllm"], typer.Option(help="Engine that the serving notes are for.")
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

    known = _known(model)
    chosen = _recipe(w, recipe, set_, known)
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
            _print_json(plan_dict(prepared.plan, folder))
        return
    with StopRequest() as stop, RunProgress(quiet=as_json) as progress:
        manifest = quantize_checkpoint(prepared, progress, restart=restart, stop=stop)
    seconds = time.monotonic() - started
    peak = peak_memory(prepared.device)
    if as_json:
        report = {key: value for key, value in manifest.items() if key not in ("tensors", "files", "modules")}
        _print_json({"out": str(folder), "seconds": round(seconds, 3), **peak, **report})
    else:
        show_result(manifest, folder, seconds, peak)
        typer.echo(str(folder))


def _recipe(w: str | None, recipe: str | None, settings: list[str] | None, known: "KnownModel | None") -> "Recipe":
    from kvq.recipes.schema import load_recipe, override

    if w is not None and recipe is not None:
        raise RecipeError("--w and --recipe both name a recipe; give one of them.")
    return override(load_recipe(w or recipe or (known.default_recipe if known else "int4")), settings or [])


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
        _print_json(plan_dict(plan, out))
    else:
        show_plan(plan, out, OUT)


@app.command()
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
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the run would use.")] = "cuda",
    target: Annotated[Literal["sglang", "vllm"], typer.Option(help="Engine for the serving notes.")] = "sglang",
    revision: Annotated[str | None, typer.Option(help="Hub revision; by default the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a recipe would do, and what serving and running it would take. Reads no weights."""
    import gc

    gc.disable()  # half a million small objects that all stay until the end: collecting takes a third of the time
    from kvq.checkpoint.metadata import read_metadata
    from kvq.publish.gpus import find_gpu
    from kvq.publish.parallel import Parallel
    from kvq.publish.plan_report import comparison_row, plan_report
    from kvq.publish.sizing import make_deployment
    from kvq.recipes.plan import resolve_plan

    names = _compared(recipes, compare, w, recipe)
    known, kind, parallel = _known(model), find_gpu(gpu), Parallel(tp or gpus, ep, dp)
    chosen = [_recipe(name, None, set_, known) for name in names] or [_recipe(w, recipe, set_, known)]
    metadata = read_metadata(model, revision, alias=known is not None)
    rows = []
    for one in chosen:
        resolved = resolve_plan(one, metadata.config, metadata.index)
        longest = int(resolved.facts.text_config.get("max_position_embeddings") or 2**31)
        deployment = make_deployment(kind, gpus, parallel, context, kv_dtype, longest)
        report = plan_report(metadata, resolved, deployment, device, target)
        rows.append(comparison_row(report) if compare else report)
    if as_json:
        _print_json(rows if compare else rows[0])
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


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Any checkpoint folder.")],
    as_json: Json = False,
) -> None:
    """Say what a checkpoint is: format, quantized classes, KV scales, MTP, dead entries, missing files."""
    from kvq.console import show_inspection
    from kvq.verify.inspection import inspect_folder

    report = inspect_folder(folder)
    if as_json:
        _print_json(report)
    else:
        show_inspection(report)


@app.command()
def models(as_json: Json = False) -> None:
    """List the models that kvq knows by a short name."""
    from kvq.console import show_models
    from kvq.recipes.models import known_models

    rows = [{"alias": alias, **model.model_dump()} for alias, model in known_models().items()]
    if as_json:
        _print_json(rows)
    else:
        show_models(rows)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A quantized checkpoint.")],
    source: Annotated[
        str | None, typer.Option(help="Its source (folder, Hub id or alias): compares all weights.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a written checkpoint from its files alone, and against its source if given."""
    from kvq.checkpoint.source import resolve_source
    from kvq.console import show_verification
    from kvq.verify.checks import verify_checkpoint

    known = _known(source) if source else None
    origin = resolve_source(known.hub if known else source).folder if source else None
    report = verify_checkpoint(folder, origin, lambda done, total: None)
    if as_json:
        _print_json(report.as_dict())
    else:
        show_verification(report)
    if not report.passed:
        raise VerificationError(report.failure())


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A quantized checkpoint.")],
    source: Annotated[Path, typer.Option(help="The checkpoint it was made from.")],
    data: Annotated[Path, typer.Option(help="Held-out JSON lines with `text`, `messages` or `input_ids`.")],
    max_rows: Annotated[int | None, typer.Option(min=1, help="Rows of the data at most.")] = None,
    max_seq_length: Annotated[int, typer.Option(min=2, help="Tokens of a row at most.")] = 512,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure the distance between the probabilities of two checkpoints, layer by layer."""
    from kvq.calibration.forward import pick_device
    from kvq.console import ERR, show_distance
    from kvq.verify.logits import measure_distance

    with ERR.status("reading", spinner="line") as status:
        distance = measure_distance(
            folder,
            source,
            data,
            max_rows=max_rows,
            max_seq_length=max_seq_length,
            device=pick_device(device),
            stage=status.update,
        )
    if as_json:
        _print_json(distance.as_dict())
    else:
        show_distance(distance, str(folder), str(source))


def _known(model: str) -> "KnownModel | None":
    """The row of an alias. A folder of that name comes first, as it does before a Hub id."""
    from kvq.recipes.models import known_models

    return None if Path(model).expanduser().is_dir() else known_models().get(model)


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


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def main() -> None:
    """Entry point: an error that a person can act on is one sentence and an exit code, never a traceback."""
    try:
        app()
    except KvqError as error:
        typer.echo(f"kvq: {error}", err=True)
        sys.exit(error.exit_code)
    except SystemExit as stop:  # typer turns Ctrl-C into this, without a word
        if stop.code == INTERRUPTED:
            typer.echo(
                "kvq: interrupted. A quantization goes on from its last finished layer with the same command.", err=True
            )
        raise
    except OSError as error:
        typer.echo(f"kvq: {error}", err=True)
        sys.exit(OutputError.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":  # torch's, not imported
            raise
        reason = str(error).split(". ")[0] or "the host has no memory left"
        typer.echo(
            f"kvq: out of memory ({reason}). Use fewer or shorter calibration sequences: --set "
            "num_calibration_samples=..., --set max_seq_length=... (with --restart: it is another run then).",
            err=True,
        )
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()

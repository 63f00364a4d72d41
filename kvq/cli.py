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

INTERRUPTED = 130
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
    from kvq.console import RunProgress, plan_dict, show_plan, show_result
    from kvq.recipes.schema import load_recipe, override

    if w is not None and recipe is not None:
        raise RecipeError("--w and --recipe both name a recipe; give one of them.")
    known = _known(model)
    chosen = override(load_recipe(w or recipe or (known.default_recipe if known else "int4")), set_ or [])
    started = time.monotonic()
    source = resolve_source(known.hub if known else model, revision)
    folder = out or Path(f"{model if known else source.name}-{chosen.name}")

    from kvq.pipeline import peak_memory, prepare, quantize_checkpoint

    prepared = prepare(source, chosen, folder, device=device, target=target, calibration=calibration)
    if not as_json:
        show_plan(prepared.plan, folder)
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


if __name__ == "__main__":
    main()

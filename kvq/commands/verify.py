"""`kvq verify`: a written checkpoint, from its files alone."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvq.commands.options import Json, path_argument, print_json, unaliased
from kvq.errors import VerificationError


def verify(
    folder: Annotated[Path, path_argument("A quantized checkpoint.")],
    source: Annotated[
        str | None, typer.Option(help="Its source (folder, Hub id or alias): compares all weights.")
    ] = None,
    target: Annotated[
        Literal["sglang", "vllm", "transformers"] | None,
        typer.Option(help="Engine whose loading of KV scales is emulated; by default the manifest's."),
    ] = None,
    without_manifest: Annotated[
        bool, typer.Option("--without-manifest", help="Accept a folder that kvq did not write: no hashes, no plan.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a written checkpoint from its files alone, and against its source if given."""
    from kvq.checkpoint.source import resolve_source
    from kvq.console import show_verification, stages
    from kvq.console.transfer import TransferLines
    from kvq.verify.checks import verify_checkpoint

    lines = TransferLines(quiet=as_json)
    origin = resolve_source(unaliased(source), None, lines.note, lines.checked).folder if source else None
    with stages() as stage:
        report = verify_checkpoint(
            folder, origin, lambda done, total: stage(f"comparing tensor {done}/{total} with the source"),
            target=target, without_manifest=without_manifest,
        )  # fmt: skip
    if as_json:
        print_json(report.as_dict())
    else:
        show_verification(report)
    if not report.passed:
        raise VerificationError(report.failure())

"""`kvq card`: the model card of a quantized checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from kvq.commands.options import path_argument


def card(
    folder: Annotated[Path, path_argument("A checkpoint that `kvq quantize` wrote.")],
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the source (owner/name), where the manifest has only a folder.")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the card; write nothing.")] = False,
) -> None:
    """Write README.md from the manifest and kvq-reports: no figure is typed by hand, and a missing one says so."""
    from kvq.publish.card import build_card, write_card

    text = build_card(folder, base_model)
    if print_only:
        typer.echo(text, nl=False)
    else:
        typer.echo(str(write_card(folder, text)))

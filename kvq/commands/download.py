"""`kvq download`: a Hub model on this machine, with every hash compared."""

from pathlib import Path
from typing import Annotated

import typer

from kvq.commands.options import Json, path_option, print_json, unaliased


def download(
    model: Annotated[str, typer.Argument(help="Hub id (owner/name) or alias; `kvq models` lists the aliases.")],
    out: Annotated[Path | None, path_option("Folder; without it the Hub cache, where kvq looks itself.")] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision; by default the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch a model, going on with what has arrived, and compare size and hash of every file with the Hub's."""
    from kvq.checkpoint.source import check_hub_id
    from kvq.checkpoint.source import download as fetch
    from kvq.console.transfer import TransferLines

    repo = unaliased(model)
    check_hub_id(repo)
    lines = TransferLines(quiet=as_json)
    source = fetch(repo, revision, out, lines.note, lines.checked)
    if as_json:
        print_json({"folder": str(source.folder), "repo": source.id, "revision": source.revision})
    else:
        typer.echo(str(source.folder))

"""`kvq evaluate`: what was lost, measured."""

from pathlib import Path
from typing import Annotated

import typer

from kvq.commands.options import Device, Json, print_json, user_path


def evaluate(
    folder: Annotated[Path, typer.Argument(parser=user_path, metavar="FOLDER", help="A quantized checkpoint.")],
    source: Annotated[Path, typer.Option(parser=user_path, metavar="FOLDER", help="The checkpoint it was made from.")],
    data: Annotated[
        Path,
        typer.Option(
            parser=user_path, metavar="FILE", help="Held-out JSON lines with `text`, `messages` or `input_ids`."
        ),
    ],
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
        print_json(distance.as_dict())
    else:
        show_distance(distance, str(folder), str(source))

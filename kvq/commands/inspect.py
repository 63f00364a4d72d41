"""`kvq inspect`: what a checkpoint is."""

from pathlib import Path
from typing import Annotated

from kvq.commands.options import Json, path_argument, print_json


def inspect(
    folder: Annotated[Path, path_argument("Any checkpoint folder.")],
    as_json: Json = False,
) -> None:
    """Say what a checkpoint is: format, quantized classes, KV scales, MTP, dead entries, missing files."""
    from kvq.console import show_inspection
    from kvq.verify.inspection import inspect_folder

    report = inspect_folder(folder)
    if as_json:
        print_json(report)
    else:
        show_inspection(report)

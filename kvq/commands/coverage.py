"""`kvq coverage`: what calibration data each expert saw."""

from pathlib import Path
from typing import Annotated

from kvq.commands.options import Json, path_argument, print_json


def coverage(
    folder: Annotated[Path, path_argument("A checkpoint that kvq has written.")],
    as_json: Json = False,
) -> None:
    """Show tokens, blend and outcome per layer and the thinnest experts; write kvq-reports/coverage.json and plots."""
    from kvq.console import show_coverage
    from kvq.publish.coverage import write_coverage

    written = write_coverage(folder)
    if as_json:
        print_json({**written.report, "written": written.as_dict()})
    else:
        show_coverage(written.report, [written.path, *written.plots], written.note)

"""`kvq doctor`: is this machine fit for the job?"""

from pathlib import Path
from typing import Annotated

import typer

from kvq.commands.options import Json, path_option, print_json
from kvq.errors import VerificationError


def doctor(
    disk: Annotated[Path, path_option("Folder to measure: where sources or outputs will lie.")] = Path("."),
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask the Hub.")] = False,
    as_json: Json = False,
) -> None:
    """Look at Python, packages, memory, GPUs, a disk, the Hub and the engines; a few seconds, nothing is changed."""
    from kvq.publish.machine import as_dict, examine

    findings = list(examine(disk, not offline))
    if as_json:
        print_json(as_dict(findings))
    else:
        from kvq.console.doctor import show_findings

        show_findings(findings)
    bad = [finding for finding in findings if finding.status == "bad"]
    if bad:
        raise VerificationError(
            "this machine is not fit: " + "; ".join(f"{item.name}: {item.found} ({item.remedy})" for item in bad)
        )

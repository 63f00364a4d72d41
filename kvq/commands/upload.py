"""`kvq upload`: a finished folder to the Hub."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvq.commands.options import Json, path_argument, print_json
from kvq.errors import INTERRUPTED, HubError, RecipeError, VerificationError
from kvq.stop import StopRequest


def upload(
    folder: Annotated[Path, path_argument("A finished output of `kvq quantize`, with its reports and card.")],
    repo: Annotated[str, typer.Argument(help="Hub repository, owner/name. It is made if it is missing.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make it private; refuses one that is public already.")
    ] = False,
    revision: Annotated[str, typer.Option(help="Branch. It is made if it is missing.")] = "main",
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete and overwrite the files of another model there.")
    ] = False,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Send what fails its checks or lacks its report; the card says so.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all, say what would be sent and removed, and change nothing.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=32, help="Files at a time.")] = 4,
    as_json: Json = False,
) -> None:
    """Check a folder, send it so that no half of it can be loaded, and compare every file with what arrived."""
    from kvq.checkpoint.hub import current_token
    from kvq.checkpoint.source import is_hub_id
    from kvq.console.transfer import TransferLines, show_planned_upload, show_upload
    from kvq.publish.bundle import check_folder, make_bundle
    from kvq.publish.upload import Target, plan_upload
    from kvq.publish.upload import upload as send

    if not is_hub_id(repo):
        raise RecipeError(f"{repo}: not a Hub repository of the form owner/name.")
    if current_token() is None:  # now, not after hours of hashing
        raise HubError(f"{repo}: there is no Hub token here. Set HF_TOKEN or run `hf auth login`. Nothing was sent.")
    progress = TransferLines(quiet=as_json)
    progress.note(f"verifying {folder}")
    faults = check_folder(folder)
    if faults and not unverified:
        raise VerificationError(
            f"{folder}: not sent: {'; '.join(faults)}. Mend that, or add --unverified: the card then says so."
        )
    bundle = make_bundle(folder, tuple(faults))
    target = Target(repo=repo, revision=revision, private=private, replace=replace, workers=workers)
    if dry_run:
        planned = {**asdict(plan_upload(bundle, target, progress)), "unverified": faults}
        print_json(planned) if as_json else show_planned_upload(planned)
        return
    try:
        with StopRequest() as stop:
            result = send(bundle, target, progress, stop)
    except KeyboardInterrupt:  # the second signal; threads that still send would keep the process alive
        sys.stderr.write("kvq: interrupted. What has arrived is kept; the same command goes on.\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    report = {**asdict(result), "unverified": faults}
    if as_json:
        print_json(report)
    else:
        show_upload(report)

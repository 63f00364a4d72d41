"""`kvq verify`: all checks of a folder, with or without its source."""

from collections.abc import Callable
from pathlib import Path

from kvq.checkpoint.index import MANIFEST_NAME, expect_folder
from kvq.errors import CheckpointError
from kvq.verify.kv_check import check_kv_scales
from kvq.verify.kv_delivery import Target, known_target
from kvq.verify.numerics import check_against_source
from kvq.verify.report import Check, VerifyReport
from kvq.verify.structure import check_structure, load_manifest

NO_MANIFEST = (
    f"there is no {MANIFEST_NAME}, so nothing tells damaged or missing files from good ones: copy it from where the "
    "folder came from, compare with --source, or say --without-manifest if kvq did not write the folder"
)


def quiet(done: int, total: int) -> None:
    """Takes progress and shows none."""


def verify_checkpoint(
    folder: Path, source: Path | None = None, progress: Callable[[int, int], None] = quiet, *,
    target: Target | None = None, without_manifest: bool = False,
) -> VerifyReport:  # fmt: skip
    """Look at the written files as a stranger would. Problems are in the report; only a folder that is none raises.

    `progress` is told how many of the tensors were compared with the source. KV scales are judged by what `target` does
    with them, by default the manifest's engine.

    No manifest is a problem, unless there is a source to compare with or `without_manifest` says that kvq did not write
    the folder: without either, a damaged or missing file looks like any other.
    """
    expect_folder(folder)
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: no config.json there. Give the folder of a checkpoint.")
    report = VerifyReport(str(folder))
    try:
        manifest = load_manifest(folder)
    except CheckpointError as error:
        manifest = None
        report.checks.append(_failed("manifest", error))
    else:
        if manifest is None and source is None and not without_manifest:
            report.checks.append(_failed("manifest", CheckpointError(NO_MANIFEST)))
    report.checks += check_structure(folder, manifest)
    report.checks.append(check_kv_scales(folder, target or known_target((manifest or {}).get("target"))))
    if source is None:
        return report
    try:
        checks, report.worst_weight_errors = check_against_source(folder, source, manifest, progress)
    except CheckpointError as error:
        checks = [_failed("source", error)]
    report.checks += checks
    return report


def _failed(name: str, error: CheckpointError) -> Check:
    check = Check(name)
    check.expect(False, str(error))
    return check

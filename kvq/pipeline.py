"""The stages in order; the only place where they meet.

reader -> plan -> calibration forward -> solver -> packer -> writer -> manifest
"""

import resource
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvq import __version__
from kvq.calibration.dataset import TokenSet, check_rows, load_packed
from kvq.calibration.forward import check_complete, pick_device
from kvq.calibration.rows import Place
from kvq.checkpoint.index import MANIFEST_NAME
from kvq.checkpoint.journal import Journal
from kvq.checkpoint.reader import CheckpointReader
from kvq.checkpoint.side_files import check_json_side_files
from kvq.checkpoint.source import Source
from kvq.checkpoint.unchanged import SourceWatch, source_digest
from kvq.checkpoint.writer import CheckpointWriter, bytes_of, check_output, check_outside, dump_json, partial_of
from kvq.errors import CalibrationError, CheckpointError, RecipeError
from kvq.publish.events import Progress
from kvq.publish.manifest import package_versions
from kvq.ranks import ALONE, Ranks
from kvq.recipes.plan import resolve_plan
from kvq.recipes.schema import Recipe
from kvq.run import Prepared, Run
from kvq.stop import StopRequest


def prepare(
    source: Source,
    recipe: Recipe,
    out: Path,
    *,
    device: str = "auto",
    target: str = "sglang",
    calibration: Place | None = None,
    ranks: Ranks = ALONE,
) -> Prepared:
    """Plan the run and check the place to write. Raises the error that the run would die of, before it starts."""
    chosen = pick_device(device)
    if (source.folder / MANIFEST_NAME).is_file():
        raise CheckpointError(
            f"{source.folder} is an output of kvq ({MANIFEST_NAME}). Quantize the checkpoint that it was made from."
        )
    reader = CheckpointReader(source.folder)
    watch = SourceWatch(source.folder, reader.index.shards)
    plan = resolve_plan(recipe, reader.config, reader.index, ranks.size)
    if calibration is not None and (plan.pass_through or not recipe.needs_calibration):
        plan = replace(
            plan, warnings=(*plan.warnings, f"{calibration.name} is not used: nothing here needs calibration data")
        )
    if not plan.pass_through:
        check_complete(reader, plan.facts)
    prepared = Prepared(source, reader, plan, out, chosen, target, calibration, watch, ranks)
    check_outside(out, source.folder)
    if prepared.left_out:
        folders = ", ".join(f"{name}/" for name in prepared.left_out)
        note = f"not copied from the source: {folders}, which kvq writes itself"
        prepared = replace(prepared, plan=replace(plan, warnings=(*plan.warnings, note)))
    _check_writable_later(prepared)
    side_bytes = bytes_of(source.folder / path for path in prepared.side_files)
    check_output(out, plan.output_bytes + side_bytes)
    return prepared


def _check_writable_later(prepared: Prepared) -> None:
    """What is written last must be known to work at the start: side files, and the new config as JSON."""
    for path in prepared.side_files:
        try:
            with (prepared.source.folder / path).open("rb") as file:
                file.read(1)
        except OSError as error:
            raise CheckpointError(f"{prepared.source.folder / path}: cannot be read ({error.strerror}).") from None
    check_json_side_files(prepared.source.folder)
    try:
        dump_json(prepared.reader.config).encode()
    except ValueError as error:
        raise CheckpointError(
            f"{prepared.source.folder / 'config.json'}: holds a value that JSON in UTF-8 cannot ({error}). Mend it."
        ) from None
    if prepared.plan.recipe.needs_calibration and not prepared.plan.pass_through:
        check_rows(prepared.calibration)


def quantize_checkpoint(
    prepared: Prepared, progress: Progress, *, restart: bool = False, stop: StopRequest | None = None
) -> dict[str, object]:
    """Run it, or go on with a run of the same fingerprint. Gives the manifest that was written.

    An error or a stop leaves `<out>.partial` and no `<out>`; `restart` discards what an earlier run left.
    """
    tokens = load_calibration(prepared)  # before anything is written
    journal = _open_journal(prepared, _fingerprint(prepared, tokens), restart)
    run = Run(prepared, CheckpointWriter(prepared.out, journal), progress, tokens=tokens, stop=stop)
    with run.writer:
        if prepared.plan.pass_through:
            run.copy_shards(journal)
        else:
            run.quantize(journal)
        return run.finish(journal)


def _open_journal(prepared: Prepared, fingerprint: Mapping[str, object], restart: bool) -> Journal:
    """Rank 0 takes the folder when all ranks have found their request in order; then the others follow."""
    partial, ranks = partial_of(prepared.out), prepared.ranks
    journal = Journal(partial, ranks.rank, ranks.size)
    _check_same(ranks.gather(fingerprint), ranks)
    if ranks.first:
        journal.begin(fingerprint, restart=restart)
    ranks.gather(None)
    if not ranks.first:
        journal.follow(fingerprint)
    return journal


def _check_same(fingerprints: Sequence[Mapping[str, object]], ranks: Ranks) -> None:
    """On several hosts each rank has read its own installation's and its own disk's."""
    for rank, one in enumerate(fingerprints):
        different = [key for key, value in fingerprints[0].items() if one[key] != value]
        if different:
            place = f" on {ranks.hosts[rank]}" if ranks.hosts else ""
            raise RecipeError(
                f"rank {rank}{place} has other {' and '.join(different)} than rank 0. All ranks need the same kvq, "
                "packages, source and calibration data."
            )


def load_calibration(prepared: Prepared) -> TokenSet | None:
    """The data, where it is needed. Raises CalibrationError for rows that do not fit the model; reads no weights."""
    plan = prepared.plan
    if plan.pass_through or not plan.recipe.needs_calibration:
        return None
    tokens = load_packed(
        prepared.reader.folder, int(plan.facts.text_config["vocab_size"]), prepared.calibration,
        plan.recipe.num_calibration_samples, plan.recipe.max_seq_length,
    )  # fmt: skip
    if tokens.tokens_NS.shape[0] < prepared.ranks.size:
        raise CalibrationError(
            f"{tokens.title}: {tokens.tokens_NS.shape[0]} sequences for {prepared.ranks.size} ranks; each needs one."
        )
    return tokens


def _fingerprint(prepared: Prepared, tokens: TokenSet | None) -> dict[str, object]:
    """All that the output depends on. A difference in any of these forbids going on with a run."""
    reader = prepared.reader
    return {
        "kvq version": __version__,
        "package versions": package_versions(),
        "recipe": prepared.plan.recipe.sha256,
        "source": [prepared.source.name, prepared.source.revision],
        "source files": source_digest(reader.folder, reader.config, reader.index),
        "calibration data": None if tokens is None else [tokens.title, tokens.sha256],
        "device": prepared.device.type,
        "number of ranks": prepared.ranks.size,
        "target": prepared.target,
    }


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Most bytes that this process held, on the host (resident) and on the device (allocated)."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"peak_host_bytes": kilobytes * 1024, "peak_device_bytes": on_device}

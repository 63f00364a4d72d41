"""Is what was written what the source says? Unpacks the files and compares them with the source, module by module."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.checkpoint.dequant import load_weight
from kvq.checkpoint.formats import SourceFormat, detect_format
from kvq.checkpoint.reader import CheckpointReader
from kvq.errors import CheckpointError
from kvq.verify.report import Check
from kvq.verify.smoothing import rescaled_original

# INT4 gave 0.09 to 0.16 on the test checkpoints; two unrelated matrices of one norm are sqrt(2) apart.
MAX_RELATIVE_WEIGHT_ERROR = 0.35
MANIFEST_TOLERANCE = 1e-3


def check_against_source(
    folder: Path, source: Path, manifest: Mapping[str, Any] | None, progress: Callable[[int, int], None]
) -> tuple[list[Check], list[tuple[str, float]]]:
    """Weight error of every packed module and equality of everything else; also the worst modules with their errors."""
    ours, theirs = CheckpointReader(folder), CheckpointReader(source)
    our_format, their_format = (detect_format(reader.config, reader.index) for reader in (ours, theirs))
    recorded = {row["name"]: row["relative_weight_error"] for row in (manifest or {}).get("modules", [])}
    planned: Mapping[str, Any] = (manifest or {}).get("tensors", {})
    packed, kept = Check("packed weights"), Check("kept tensors")
    errors: list[tuple[str, float]] = []
    pass_through = bool((manifest or {}).get("pass_through"))
    smoothed = ((manifest or {}).get("recipe") or {}).get("solver") == "awq"
    names = sorted(ours.index.tensors)
    for number, name in enumerate(names, start=1):
        progress(number, len(names))
        module = name.rsplit(".", 1)[0]
        if (planned.get(name) or {}).get("action") == "kv_scale":
            continue  # made from activations; the source has none
        if name.endswith(".weight_packed") and not pass_through:
            error = _weight_error(packed, (ours, our_format), (theirs, their_format), module, smoothed)
            if error is not None:
                errors.append((module, error))
                _expect_error(packed, module, error, recorded)
        elif pass_through or not _belongs_to_packed(ours, module):
            _expect_kept(kept, ours, (theirs, their_format), name, planned.get(name))
        if number % 1000 == 0:
            ours.release()
            theirs.release()
    _expect_all_used(kept, ours, theirs, planned)
    return [packed, kept], sorted(errors, key=lambda item: -item[1])[:5]


def _belongs_to_packed(reader: CheckpointReader, module: str) -> bool:
    return f"{module}.weight_packed" in reader.index


def _weight_error(
    check: Check,
    ours: tuple[CheckpointReader, SourceFormat],
    theirs: tuple[CheckpointReader, SourceFormat],
    module: str,
    smoothed: bool,
) -> float | None:
    """Relative distance of the weights; None (and a problem) when one of them cannot be read.

    `smoothed`: AWQ has scaled up and down of each expert against each other.
    """
    try:
        written, original = load_weight(*ours, module), load_weight(*theirs, module)
    except CheckpointError as error:
        check.expect(False, str(error))
        return None
    if written.shape != original.shape:
        check.expect(False, f"{module} is {list(written.shape)}, in the source {list(original.shape)}")
        return None
    if smoothed:
        rescaled = rescaled_original(lambda name: (load_weight(*ours, name), load_weight(*theirs, name)), module)
        check.expect(rescaled is not None, f"{module}: up and down of this expert were scaled apart")
        original = original if rescaled is None else rescaled
    return relative_error(written, original)


def relative_error(written: Tensor, original: Tensor) -> float:
    """Frobenius norm of the difference over that of the original; 0 for an all-zero original met exactly."""
    distance, norm = (float(torch.linalg.vector_norm(t.double())) for t in (written - original, original))
    return distance / norm if norm > 0 else (0.0 if distance == 0 else float("inf"))


def _expect_error(check: Check, module: str, error: float, recorded: Mapping[str, float]) -> None:
    check.expect(
        error <= MAX_RELATIVE_WEIGHT_ERROR, f"{module}: relative weight error {error:.3f} is not INT4 rounding"
    )
    if isinstance(recorded.get(module), float):
        check.expect(
            abs(error - recorded[module]) <= MANIFEST_TOLERANCE,
            f"{module}: relative weight error is {error:.4f}, when written it was {recorded[module]:.4f}",
        )


def _expect_kept(
    check: Check,
    ours: CheckpointReader,
    theirs: tuple[CheckpointReader, SourceFormat],
    name: str,
    plan: Mapping[str, Any] | None,
) -> None:
    reader, source = theirs
    original_name = _source_name(name, plan, source, reader)
    try:
        written, original = ours.tensor(name), reader.tensor(original_name)
        if original.dtype == torch.float8_e4m3fn and written.dtype == torch.bfloat16:
            original = load_weight(reader, source, original_name.removesuffix(".weight")).to(torch.bfloat16)
    except CheckpointError as error:
        check.expect(False, str(error))
        return
    check.expect(_same_bytes(written, original), f"{name} differs from {original_name} of the source")


def _source_name(name: str, plan: Mapping[str, Any] | None, source: SourceFormat, reader: CheckpointReader) -> str:
    """The manifest names it; without one, only the scale's name can have changed."""
    if plan is not None:
        return str(plan["sources"][0])
    renamed = name.removesuffix("weight_scale") + (source.scale_suffix or "weight_scale")
    return renamed if name.endswith(".weight_scale") and renamed in reader.index else name


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.numel() == 0:
        return True
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def _expect_all_used(
    check: Check, ours: CheckpointReader, theirs: CheckpointReader, planned: Mapping[str, Any]
) -> None:
    """Nothing of the source is lost: each of its tensors is a source of something written."""
    if not planned:
        for name in theirs.index.tensors:
            check.expect(_is_kept_in(ours, name), f"{name} of the source is in no tensor of {ours.folder}")
        return
    used = {source for plan in planned.values() for source in plan["sources"]}
    for name in theirs.index.tensors:
        check.expect(name in used, f"{name} of the source is in no tensor of {ours.folder}")


def _is_kept_in(ours: CheckpointReader, name: str) -> bool:
    """Whether a tensor of the source has one in the output that can be made of it, judged by names."""
    module, _, part = name.rpartition(".")
    if name in ours.index or f"{module}.weight_packed" in ours.index:
        return True
    weight = ours.index.tensors.get(f"{module}.weight")
    widened = weight is not None and weight.dtype == "BF16"
    return part in ("weight_scale", "weight_scale_inv") and (widened or f"{module}.weight_scale" in ours.index)

"""The base model's side of a comparison, kept, so that a second candidate costs half.

What is kept are the final hidden states of all positions, not the logits: [N * S, H] in the computing type instead of
[N * S, V], 25 times smaller for GLM-5.2 than 16-bit log probabilities would be. The logits are made again from them and
the source's own output matrix, by the same operations on the same bytes: this causes no error at all on the same kind
of device with the same versions, which the fingerprint holds to.

    FILE.safetensors    one tensor for each group of sequences; the metadata hold the fingerprint as JSON

Shape suffixes: N = sequences, S = tokens, H = hidden size.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvq.calibration.forward import ModelRunner
from kvq.checkpoint.unchanged import source_digest
from kvq.errors import OutputError, VerificationError
from kvq.verify.documents import TEXT_FILES, EvaluationSet

SCHEMA = "kvq.base-logits/1"


def fingerprint(runner: ModelRunner, data: EvaluationSet) -> dict[str, str]:
    """All that the kept states depend on."""
    folder = runner.reader.folder
    return {
        "schema": SCHEMA,
        "source": source_digest(folder, runner.reader.config, runner.reader.index),
        "data": data.sha256(),
        "tokenizer": _files_sha256([folder / name for name in TEXT_FILES]),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": runner.device.type,
        "torch": torch.__version__.split("+")[0],
    }


def _files_sha256(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes() if path.exists() else b"absent")
    return digest.hexdigest()


def save_base(file: Path, hidden: Sequence[Tensor], depends_on: Mapping[str, str]) -> None:
    """Write the states of all groups [N, S, H] under the file's name at once. Raises OutputError."""
    partial = file.with_name(file.name + ".partial")
    tensors = {_name(number): value.flatten(0, 1) for number, value in enumerate(hidden)}
    try:
        save_file(tensors, partial, metadata={"kvq": json.dumps(dict(depends_on), sort_keys=True)})
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{file}: cannot be written ({error}). Choose another --save-base-logits.") from None


def _name(number: int) -> str:
    return f"group.{number:05}"


@contextmanager
def open_base(file: Path, depends_on: Mapping[str, str], num_groups: int) -> Iterator[list[Any]]:
    """The kept states [N * S, H] of every group, read piece by piece when sliced.

    Raises VerificationError for a file that is none, or was kept for anything else.
    """
    try:
        opened = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise VerificationError(
            f"{file}: is no file of base logits ({error}). Make one with --save-base-logits."
        ) from None
    with opened as kept:
        _expect_match(file, (kept.metadata() or {}).get("kvq"), depends_on)
        yield [kept.get_slice(_name(number)) for number in range(num_groups)]


def _expect_match(file: Path, text: str | None, depends_on: Mapping[str, str]) -> None:
    try:
        kept = json.loads(text or "")
    except (ValueError, RecursionError):
        kept = None
    if not isinstance(kept, dict):
        raise VerificationError(f"{file}: was not written by `kvq evaluate --save-base-logits`.")
    different = sorted(key for key in {*kept, *depends_on} if kept.get(key) != depends_on.get(key))
    if different:
        raise VerificationError(
            f"{file}: was kept for another {' and '.join(different)}, so comparing with it would mean nothing. Make it "
            "again with --save-base-logits."
        )

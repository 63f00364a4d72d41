"""What two checkpoints are compared on: documents with their domain, and long sequences packed from them.

Shape suffixes: N = sequences, S = tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.dataset import RowEncoder, read_rows, tokens_sha256
from kvq.errors import CalibrationError, VerificationError

DOMAIN_FIELDS = ("domain", "kind")
VOCABULARY_FILES = ("tokenizer.json", "tiktoken.model")
TEXT_FILES = (*VOCABULARY_FILES, "tokenizer_config.json", "chat_template.jinja")
LONG_SEQUENCES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """`domain` is the row's own `domain` or `kind`, else the name of its file without the ending."""

    tokens_S: Tensor
    domain: str


@dataclass(frozen=True, slots=True)
class DataFile:
    """Where documents came from. `num_left_out` rows had fewer than two tokens."""

    name: str
    sha256: str
    num_rows: int
    num_documents: int
    num_left_out: int
    num_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationSet:
    """`long_NS` holds whole sequences of one length, or nothing. `notes` say what could not be checked."""

    documents: list[Document]
    long_NS: Tensor | None
    files: list[DataFile]
    notes: list[str]

    def groups(self) -> list["Group"]:
        """Documents of equal length together, longest first, then the long sequences."""
        groups = by_length([document.tokens_S for document in self.documents])
        return groups if self.long_NS is None else [*groups, Group(self.long_NS, None)]

    def sha256(self) -> str:
        """Identifies the tokens of all groups and their order."""
        return tokens_sha256(group.tokens_NS for group in self.groups())


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Sequences of one length. `numbers` are their documents' indices; None for long sequences."""

    tokens_NS: Tensor
    numbers: list[int] | None


def by_length(sequences: Sequence[Tensor]) -> list[Group]:
    """Sequences of equal length stacked, longest first; `numbers` say where each stood."""
    numbers_by_length: dict[int, list[int]] = {}
    for number, tokens_S in enumerate(sequences):
        numbers_by_length.setdefault(len(tokens_S), []).append(number)
    return [
        Group(torch.stack([sequences[number] for number in numbers]), numbers)
        for _, numbers in sorted(numbers_by_length.items(), reverse=True)
    ]


@dataclass(frozen=True, slots=True)
class Cut:
    """How rows become sequences: rows of a file at most, tokens of a document at most, length of a long sequence."""

    max_rows: int | None
    max_seq_length: int
    long_context: int | None = None


def load_evaluation_set(source: Path, other: Path, vocab_size: int, data: Sequence[Path], cut: Cut) -> EvaluationSet:
    """Rows of all files as token sequences, by the source's tokenizer and chat template.

    Raises CalibrationError for data that give nothing, VerificationError where `other` would read them differently.
    """
    encoder, notes = RowEncoder(source, vocab_size), list[str]()
    second = _second_encoder(source, other, vocab_size, notes)
    documents: list[Document] = []
    files: list[DataFile] = []
    stream: list[int] = []
    for file in data:
        if file.is_dir():
            raise CalibrationError(f"{file}: is a folder; its files are domains. Give each by a --data of its own.")
        rows = read_rows(file)[: cut.max_rows]
        kept = 0
        for number, row in enumerate(rows, start=1):
            place = f"{file}:{number}"
            ids = encoder.encode(row, place)
            if second is not None:
                _expect_same(ids, second.encode(row, place), place, source, other)
            stream += ids if cut.long_context else []
            if len(ids) > 1:
                kept += 1
                documents.append(Document(torch.tensor(ids[: cut.max_seq_length]), _domain(row, file)))
        tokens = sum(len(document.tokens_S) for document in documents[len(documents) - kept :])
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        files.append(DataFile(file.name, digest, len(rows), kept, len(rows) - kept, tokens))
    if not documents:
        raise CalibrationError(f"{', '.join(map(str, data))}: no row gives two tokens or more.")
    return EvaluationSet(documents, _pack(stream, cut.long_context, data), files, notes)


def _domain(row: dict[str, Any], file: Path) -> str:
    named = [row[field] for field in DOMAIN_FIELDS if isinstance(row.get(field), str) and row[field]]
    return named[0] if named else file.stem


def _pack(stream: list[int], length: int | None, data: Sequence[Path]) -> Tensor | None:
    """All rows one after the other, cut into whole sequences: no padding, no token twice."""
    if length is None:
        return None
    count = min(LONG_SEQUENCES, len(stream) // length)
    if count == 0:
        raise CalibrationError(
            f"{', '.join(map(str, data))}: {len(stream)} tokens in all, fewer than one sequence of --long-context "
            f"{length}. Give more data or a smaller length."
        )
    return torch.tensor(stream[: count * length]).reshape(count, length)


def _second_encoder(source: Path, other: Path, vocab_size: int, notes: list[str]) -> RowEncoder | None:
    """The other folder's encoder, if its files differ from the source's and rows must be encoded twice to compare."""
    if not any((other / name).exists() for name in VOCABULARY_FILES):
        notes.append(f"{other.name} has no tokenizer; the source's was used unchecked")
        return None
    same = all(_bytes(source / name) == _bytes(other / name) for name in TEXT_FILES)
    return None if same else RowEncoder(other, vocab_size)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _expect_same(ids: list[int], others: list[int], place: str, source: Path, other: Path) -> None:
    if ids != others:
        pairs = enumerate(zip(ids, others, strict=False))
        where = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(ids), len(others)))
        raise VerificationError(
            f"{place}: {source} reads {len(ids)} tokens and {other} {len(others)}, which part at token {where}: their "
            "tokenizers or chat templates differ, and probabilities of different tokens cannot be compared. Copy the "
            "source's tokenizer files, or give rows of `input_ids`."
        )

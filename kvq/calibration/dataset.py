"""Calibration and evaluation data: rows -> text by the model's own chat template -> token sequences.

Rows are JSON lines with `text`, `messages` (with optional `tools`) or `input_ids`.

Shape suffixes: N = sequences, S = tokens per sequence.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.transformers_door import load_tokenizer
from kvq.errors import CalibrationError

EMBEDDED = "embedded"
MIN_TOKENS = 8
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, eq=False)
class TokenSet:
    """Sequences of one length. `sha256` identifies the tokens and their order, `num_asked` the sequences wanted."""

    tokens_NS: Tensor
    name: str
    num_rows: int
    num_asked: int
    sha256: str

    @property
    def num_tokens(self) -> int:
        return self.tokens_NS.numel()


def read_rows(file: Path | None) -> list[dict[str, Any]]:
    """Rows of a JSONL file, or of the set that ships with kvq for None. Raises CalibrationError with the line."""
    if file is None:
        place: Any = resources.files("kvq.calibration") / "data" / "default.jsonl"
    else:
        place = file
    try:
        text = place.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(
            f"{place}: cannot be read ({error}). Give a JSON-lines file in UTF-8 with `text` rows."
        ) from None
    # Not splitlines(): JSON strings may hold U+2028 and other characters that it takes for the end of a line.
    rows = [_row(place, number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not rows:
        raise CalibrationError(
            f"{place}: holds no rows. Give a JSON-lines file with `text`, `messages` or `input_ids` rows."
        )
    return rows


def _row(place: Any, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{place}:{number}: not valid JSON ({error}).") from None
    kinds = {"text": str, "messages": list, "input_ids": list}
    if not isinstance(row, dict) or not any(isinstance(row.get(key), kind) for key, kind in kinds.items()):
        raise CalibrationError(
            f"{place}:{number}: a row needs `text` (string), `messages` (list) or `input_ids` (list)."
        )
    for message in row["messages"] if isinstance(row.get("messages"), list) else ():
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise CalibrationError(
                f"{place}:{number}: each message needs a `role` of {', '.join(ROLES)}; chat templates leave out others "
                f"without a word (found {str(message)[:80]})."
            )
    return row


class RowEncoder:
    """Token ids of rows, by the tokenizer and chat template of a checkpoint folder."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokenizer: Any = None

    def encode(self, row: dict[str, Any], place: str) -> list[int]:
        """Raises CalibrationError if the row cannot be rendered or holds ids outside the vocabulary."""
        ids = row["input_ids"] if isinstance(row.get("input_ids"), list) else self._ids(row, place)
        bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self._vocab_size]
        if bad:
            raise CalibrationError(
                f"{place}: token id {str(bad[0])[:40]} is not a whole number below the model's vocabulary size "
                f"{self._vocab_size}; was the data made with another tokenizer?"
            )
        return list(ids)

    def _ids(self, row: dict[str, Any], place: str) -> list[int]:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._folder)
        text = row.get("text")
        if not isinstance(text, str):
            text = self._render(row, place)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise CalibrationError(f"{place}: holds half of a surrogate pair (\\ud800 to \\udfff), which is not text.")
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _render(self, row: dict[str, Any], place: str) -> str:
        from jinja2.exceptions import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        except (
            TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
        ) as error:  # fmt: skip
            raise CalibrationError(
                f"{place}: the model's chat template cannot render these messages ({type(error).__name__}: {error})."
            ) from None
        return str(text)


def _encode_all(rows: list[dict[str, Any]], folder: Path, vocab_size: int, place: str) -> Iterator[list[int]]:
    encoder = RowEncoder(folder, vocab_size)
    for number, row in enumerate(rows, start=1):
        yield encoder.encode(row, f"{place}:{number}")


def load_packed(folder: Path, vocab_size: int, file: Path | None, num_sequences: int, seq_length: int) -> TokenSet:
    """Rows joined one after the other and cut into sequences of `seq_length`: no padding, no token seen twice.

    Fewer sequences than asked are fine and visible in the result; less than one whole sequence gives one shorter
    sequence. Raises CalibrationError below 8 tokens.
    """
    rows = read_rows(file)
    name = EMBEDDED if file is None else str(file)
    stream: list[int] = []
    used = 0
    for ids in _encode_all(rows, folder, vocab_size, name):
        if len(stream) >= num_sequences * seq_length:
            break
        stream += ids
        used += 1
    if len(stream) < MIN_TOKENS:
        raise CalibrationError(f"{name}: gives {len(stream)} tokens, too few to calibrate on. Give more rows.")
    length = min(seq_length, len(stream))
    count = min(num_sequences, len(stream) // length)
    tokens_NS = torch.tensor(stream[: count * length], dtype=torch.int64).reshape(count, length)
    return TokenSet(tokens_NS, name, used, num_sequences, _digest([tokens_NS]))


def load_documents(folder: Path, vocab_size: int, file: Path, max_rows: int | None, seq_length: int) -> list[Tensor]:
    """Each row a sequence of its own, cut at `seq_length` (for evaluation); rows below two tokens are left out."""
    rows = read_rows(file)[:max_rows]
    sequences = [ids[:seq_length] for ids in _encode_all(rows, folder, vocab_size, str(file))]
    kept = [torch.tensor(ids, dtype=torch.int64) for ids in sequences if len(ids) > 1]
    if not kept:
        raise CalibrationError(f"{file}: no row gives two tokens or more.")
    return kept


def _digest(tokens: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for sequence in tokens:
        digest.update(str(list(sequence.shape)).encode())
        digest.update(sequence.to(torch.int32).numpy().tobytes())
    return digest.hexdigest()

"""Calibration and evaluation data: rows -> text by the model's own chat template -> token sequences.

`rows.py` says where rows come from.

Shape suffixes: N = sequences, S = tokens per sequence.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.rows import HUB_PREFIX, HubDataset, Place, iter_rows
from kvq.calibration.tokenizer_process import TokenizerProcess
from kvq.errors import CalibrationError

EMBEDDED = "embedded"
MIN_TOKENS = 8


@dataclass(frozen=True, slots=True, eq=False)
class TokenSet:
    """Sequences of one length. `sha256` identifies the tokens and their order, `num_asked` the sequences wanted.

    `rendered_sha256` is over what was tokenized: of each row used its rendered text in UTF-8 (the ids as JSON for a row
    of ids), each followed by a zero byte. It does not depend on the tokenizer or on how the tokens were cut.
    """

    tokens_NS: Tensor
    name: str
    num_rows: int
    num_asked: int
    sha256: str
    rendered_sha256: str

    @property
    def title(self) -> str:
        """The name without folders of this machine."""
        return self.name if self.name.startswith(HUB_PREFIX) else self.name.rsplit("/", 1)[-1]

    @property
    def num_tokens(self) -> int:
        return self.tokens_NS.numel()


def read_rows(place: Place | None) -> list[dict[str, Any]]:
    """All rows, or those of the set that ships with kvq for None. Raises CalibrationError with the row's place."""
    rows = [row.values for row in iter_rows(place)]
    if not rows:
        raise _no_rows(place)
    return rows


def check_rows(place: Place | None) -> None:
    """Raise now what reading the data would raise later: every row of files, the first of a Hub dataset."""
    if not isinstance(place, HubDataset):
        read_rows(place)
    elif next(iter_rows(place), None) is None:
        raise _no_rows(place)


def _no_rows(place: Place | None) -> CalibrationError:
    return CalibrationError(
        f"{place}: holds no rows. Give a JSON-lines file (or Parquet, text, a Hub dataset) with rows."
    )


class RowEncoder:
    """Token ids of rows, by the tokenizer and chat template of a checkpoint folder."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._tokenizer: TokenizerProcess | None = None
        self._rendered = hashlib.sha256()

    def encode(self, row: dict[str, Any], place: str) -> list[int]:
        """Raises CalibrationError if the row cannot be rendered or holds ids outside the vocabulary."""
        given = row.get("input_ids")
        ids = given if isinstance(given, list) else self._ids(row, place)
        bad = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < self._vocab_size]
        if bad:
            raise CalibrationError(
                f"{place}: token id {str(bad[0])[:40]} is not a whole number below the model's vocabulary size "
                f"{self._vocab_size}; was the data made with another tokenizer?"
            )
        if ids is given:
            self._note(json.dumps(ids, separators=(",", ":")))
        return list(ids)

    @property
    def rendered_sha256(self) -> str:
        """Over all rows encoded so far."""
        return self._rendered.hexdigest()

    def _note(self, rendered: str) -> None:
        self._rendered.update(rendered.encode() + b"\0")

    def _ids(self, row: dict[str, Any], place: str) -> list[int]:
        if self._tokenizer is None:
            self._tokenizer = TokenizerProcess(self._folder)
        text = row.get("text")
        if not isinstance(text, str):
            text = self._tokenizer.render(row["messages"], row.get("tools"), place)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise CalibrationError(f"{place}: holds half of a surrogate pair (\\ud800 to \\udfff), which is not text.")
        self._note(text)
        return self._tokenizer.encode(text, place)


def load_packed(folder: Path, vocab_size: int, place: Place | None, num_sequences: int, seq_length: int) -> TokenSet:
    """Rows joined one after the other and cut into sequences of `seq_length`: no padding, no token seen twice.

    Fewer sequences than asked are fine and visible in the result; less than one whole sequence gives one shorter
    sequence. Rows after the last sequence are not read. Raises CalibrationError below 8 tokens.
    """
    name = EMBEDDED if place is None else str(place)
    encoder = RowEncoder(folder, vocab_size)
    stream: list[int] = []
    used = 0
    for row in iter_rows(place):
        stream += encoder.encode(row.values, row.place)
        used += 1
        if len(stream) >= num_sequences * seq_length:
            break
    if not used:
        raise _no_rows(place)
    if len(stream) < MIN_TOKENS:
        raise CalibrationError(f"{name}: gives {len(stream)} tokens, too few to calibrate on. Give more rows.")
    length = min(seq_length, len(stream))
    count = min(num_sequences, len(stream) // length)
    tokens_NS = torch.tensor(stream[: count * length], dtype=torch.int64).reshape(count, length)
    return TokenSet(tokens_NS, name, used, num_sequences, tokens_sha256([tokens_NS]), encoder.rendered_sha256)


def load_documents(folder: Path, vocab_size: int, place: Place, max_rows: int | None, seq_length: int) -> list[Tensor]:
    """Each row a sequence of its own, cut at `seq_length` (for evaluation); rows below two tokens are left out."""
    encoder = RowEncoder(folder, vocab_size)
    sequences = [encoder.encode(row.values, row.place)[:seq_length] for row in islice(iter_rows(place), max_rows)]
    kept = [torch.tensor(ids, dtype=torch.int64) for ids in sequences if len(ids) > 1]
    if not sequences:
        raise _no_rows(place)
    if not kept:
        raise CalibrationError(f"{place}: no row gives two tokens or more.")
    return kept


def tokens_sha256(groups: Iterable[Tensor]) -> str:
    """Identifies the tokens of all groups [N, S], how they were cut, and their order."""
    digest = hashlib.sha256()
    for tokens_NS in groups:
        digest.update(str(list(tokens_NS.shape)).encode())
        digest.update(tokens_NS.to(torch.int32).numpy().tobytes())
    return digest.hexdigest()

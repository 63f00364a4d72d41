"""A checkpoint's own tokenizer, chat template and stop tokens, for prompts.

The text is the model's own, special tokens included: tool calls are written with them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvq.calibration.tokenizer_process import TokenizerProcess
from kvq.checkpoint.index import expect_folder, load_json
from kvq.errors import CheckpointError


class ChatFormat:
    """Messages to token ids, and ids to text. Raises CheckpointError without a folder, CalibrationError without a
    tokenizer."""

    def __init__(self, folder: Path) -> None:
        expect_folder(folder)  # before transformers takes its name for a Hub id
        self.folder = folder
        self._tokenizer = TokenizerProcess(folder)
        self.stop_ids = stop_ids(folder)

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, place: str) -> str:
        """The prompt up to where the model's answer begins. Raises CalibrationError."""
        return self._tokenizer.render(messages, tools, place, add_generation_prompt=True)

    def encode(self, text: str) -> list[int]:
        """Ids with nothing added."""
        return self._tokenizer.encode(text, str(self.folder))

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens and spaces as they are."""
        return self._tokenizer.decode(ids)


def stop_ids(folder: Path) -> frozenset[int]:
    """Tokens that end an answer, from generation_config.json, else config.json. Raises CheckpointError."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        value = load_json(path).get("eos_token_id")
        ids = [value] if isinstance(value, int) else value
        if isinstance(ids, list) and ids and all(isinstance(one, int) for one in ids):
            return frozenset(ids)
    raise CheckpointError(
        f"{folder}: neither generation_config.json nor config.json names an eos_token_id, which ends an answer. "
        "Download generation_config.json again."
    )

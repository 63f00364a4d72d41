"""A checkpoint's own tokenizer, chat template and stop tokens, for prompts.

The text is the model's own, special tokens included: tool calls are written with them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvq.calibration.transformers_door import load_tokenizer
from kvq.checkpoint.index import expect_folder, load_json
from kvq.errors import CalibrationError, CheckpointError


class ChatFormat:
    """Messages to token ids, and ids to text. Raises CheckpointError without a folder, CalibrationError without a
    tokenizer."""

    def __init__(self, folder: Path) -> None:
        expect_folder(folder)  # before transformers takes its name for a Hub id
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self.stop_ids = stop_ids(folder)

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, place: str) -> str:
        """The prompt up to where the model's answer begins. Raises CalibrationError."""
        from jinja2.exceptions import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CalibrationError(
                f"{place}: the chat template of {self.folder} cannot render it ({type(error).__name__}: {error})."
            ) from None
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Ids with nothing added."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens and spaces as they are."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


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

"""Side files that engines and tokenizers read as JSON objects."""

from pathlib import Path

from kvq.checkpoint.index import load_json

JSON_OBJECTS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "preprocessor_config.json", "chat_template.json",
)  # fmt: skip


def json_side_files(folder: Path) -> list[Path]:
    """Those of them that a folder has."""
    return [folder / name for name in JSON_OBJECTS if (folder / name).exists()]


def check_json_side_files(folder: Path) -> None:
    """Raise CheckpointError for the first that is damaged: copied as it is, it would stop the engine's start."""
    for path in json_side_files(folder):
        load_json(path)

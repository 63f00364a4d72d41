"""The card's YAML head, which the Hub reads: what the model is made from, how it is stored, whose licence holds.

Fields: huggingface.co/docs/hub/model-cards. `base_model_relation` keeps the Hub from filing it as a fine-tune.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvq.errors import CheckpointError

CARD, SOURCE_CARD = "README.md", "SOURCE_README.md"
LICENSE_FILES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "LICENCE", "COPYING")
LICENSE_KEYS = ("license", "license_name", "license_link")
MAX_HEAD = 64 * 1024


def front_matter(folder: Path, base_model: str | None, model_type: str, dtypes: Iterable[str]) -> str:
    """YAML between two rules. Raises CheckpointError for a source card whose own head is no YAML."""
    source = source_metadata(folder)
    values: dict[str, Any] = {}
    if base_model is not None:
        values |= {"base_model": [base_model], "base_model_relation": "quantized"}
    values |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    values |= license_fields(folder, source)
    language = source.get("language")
    if isinstance(language, str) or (isinstance(language, list) and all(isinstance(one, str) for one in language)):
        values["language"] = language
    values["tags"] = ["kvq", "compressed-tensors", *sorted(dtype.lower() for dtype in dtypes), model_type]
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10_000)
    return f"---\n{text}---\n"


def license_fields(folder: Path, source: Mapping[str, Any]) -> dict[str, str]:
    """The source card's, else the file that lies beside it; nothing where neither is there."""
    fields = {key: value for key in LICENSE_KEYS if isinstance(value := source.get(key), str) and value.strip()}
    if "license" in fields:
        return fields
    for name in LICENSE_FILES:
        if (folder / name).is_file():
            return {"license": "other", "license_name": "see-license-file", "license_link": name}
    return {}


def source_metadata(folder: Path) -> dict[str, Any]:
    """The head of the source's card; empty without one."""
    path = folder / SOURCE_CARD
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from None
    lines = text[:MAX_HEAD].split("\n")
    if lines[0].strip() != "---":
        return {}
    closing = next((number for number, line in enumerate(lines[1:], 1) if line.strip() == "---"), None)
    if closing is None:
        return {}
    try:
        values = yaml.safe_load("\n".join(lines[1:closing]))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{path}: its head is not YAML ({reason}), so the licence cannot be read. Mend it, or remove the file."
        ) from None
    return values if isinstance(values, dict) else {}

"""Which format a model writes its calls in, by its model_type."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq.checkpoint.index import load_json
from kvq.errors import CheckpointError
from kvq.verify.toolcalls.calls import ParsedAnswer
from kvq.verify.toolcalls.glm import parse_glm
from kvq.verify.toolcalls.kimi import parse_kimi

Parser = Callable[[str, Sequence[Mapping[str, Any]]], ParsedAnswer]


def _kimi(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedAnswer:
    return parse_kimi(text)


PARSERS: Mapping[str, Parser] = {
    "glm4_moe": parse_glm, "glm_moe_dsa": parse_glm, "kimi_k2": _kimi, "kimi_k25": _kimi,
}  # fmt: skip


def parser_of(folder: Path) -> Parser:
    """Raises CheckpointError for a model whose format kvq does not know."""
    model_type = str(load_json(folder / "config.json").get("model_type"))
    if model_type not in PARSERS:
        raise CheckpointError(
            f"{folder}: kvq does not know how {model_type} writes tool calls (it knows {', '.join(PARSERS)})."
        )
    return PARSERS[model_type]

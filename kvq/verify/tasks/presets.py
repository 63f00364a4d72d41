"""Benchmarks by name, as rows: which lm-evaluation-harness task, which of its figures, and how it is asked.

`chat` tasks are asked in the model's chat template with the answer's length left to the model: the harness's own limit
(256 tokens by default) cuts reasoning off, and its stop texts ("Question:") end it in mid-thought.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """`folder` has the harness's definitions; `metric` and `filter` pick its figure; `code` means that answers are run
    as programs."""

    name: str
    folder: str
    data_set: str
    metric: str
    filter: str = "none"
    chat: bool = False
    max_tokens: int = 1
    code: bool = False


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("gsm8k", "gsm8k", "openai/gsm8k", "exact_match", "flexible-extract", chat=True, max_tokens=16384),
        Preset("arc_easy", "arc", "allenai/ai2_arc", "acc_norm"),
        Preset("arc_challenge", "arc", "allenai/ai2_arc", "acc_norm"),
        Preset("mmlu", "mmlu/default", "cais/mmlu", "acc"),
        Preset(
            "mmlu_pro", "mmlu_pro", "TIGER-Lab/MMLU-Pro", "exact_match", "custom-extract", chat=True, max_tokens=16384
        ),
        Preset(
            "humaneval", "humaneval", "openai/openai_humaneval", "pass@1", "create_test", max_tokens=1024, code=True
        ),
    )
}

"""Figures of tool calls, after the K2 Vendor Verifier: the source model is the reference for whether to call.

Definitions (github.com/MoonshotAI/K2-Vendor-Verifier): an answer is positive when the model calls a tool; precision,
recall and F1 compare that decision with the reference model's; schema accuracy is the share of positive answers whose
calls all fit their tools' JSON schemas. Exact matches compare names and arguments of all calls, in order.
"""

import json
from collections.abc import Sequence
from typing import Any

from kvq.verify.questions import Question
from kvq.verify.tasks.stats import Row, compare, share
from kvq.verify.toolcalls.ask import Outcome
from kvq.verify.toolcalls.calls import ToolCall
from kvq.verify.toolcalls.tools import schema_problem

WORST = 20


def same_calls(left: Sequence[ToolCall], right: Sequence[ToolCall]) -> bool:
    """Equal names and arguments in order; 1 and 1.0 are equal, 1 and true are not."""
    return [_canonical(call) for call in left] == [_canonical(call) for call in right]


def _canonical(call: ToolCall) -> str:
    return json.dumps([call.name, _plain(call.arguments)], sort_keys=True)


def _plain(value: Any) -> Any:
    """JSON knows one kind of number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return dict(value) if hasattr(value, "keys") else value


def calls_text(outcome: Outcome) -> str:
    """What a person reads of an answer."""
    said = [f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in outcome.parsed.calls]
    return "; ".join([*said, *outcome.parsed.problems]) or outcome.parsed.content[:200]


def reference_row(question: Question, outcome: Outcome) -> Row:
    """Right when the calls are those that the row wants, and nothing departs from the format."""
    assert question.calls is not None
    right = not outcome.parsed.problems and same_calls(outcome.parsed.calls, question.calls)
    return Row(question.id, calls_text(outcome), right, outcome.cut)


def model_figures(questions: Sequence[Question], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One model by itself: how often it calls, and whether its calls fit the schemas."""
    invalid = []
    positive = 0
    for question, outcome in zip(questions, outcomes, strict=True):
        if not outcome.parsed.triggered:
            continue
        positive += 1
        problems = [*outcome.parsed.problems]
        problems += [text for call in outcome.parsed.calls if (text := schema_problem(call, question.tools))]
        if problems:
            invalid.append({"id": question.id, "problem": problems[0]})
    return {
        "triggered": positive,
        "total": len(outcomes),
        "cut": sum(outcome.cut for outcome in outcomes),
        "schema_valid": share(positive - len(invalid), positive) if positive else None,
        "invalid": invalid[:WORST],
    }


def trigger_figures(source: Sequence[Outcome], quantized: Sequence[Outcome]) -> dict[str, Any]:
    """Precision, recall and F1 of the decision to call a tool; None where there is nothing to divide by."""
    pairs = [(theirs.parsed.triggered, ours.parsed.triggered) for theirs, ours in zip(source, quantized, strict=True)]
    both, ours_only, theirs_only = pairs.count((True, True)), pairs.count((False, True)), pairs.count((True, False))
    return {
        "both": both,
        "only_quantized": ours_only,
        "only_source": theirs_only,
        "neither": pairs.count((False, False)),
        "precision": _ratio(both, both + ours_only),
        "recall": _ratio(both, both + theirs_only),
        "f1": _ratio(2 * both, 2 * both + ours_only + theirs_only),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def compare_outcomes(
    questions: Sequence[Question], source: Sequence[Outcome], quantized: Sequence[Outcome]
) -> dict[str, Any]:
    """All figures of one way of asking."""
    same = [
        theirs.parsed.triggered == ours.parsed.triggered
        and theirs.parsed.problems == ours.parsed.problems
        and same_calls(theirs.parsed.calls, ours.parsed.calls)
        for theirs, ours in zip(source, quantized, strict=True)
    ]
    differing = [
        {"id": question.id, "source": calls_text(theirs), "quantized": calls_text(ours)}
        for question, theirs, ours, equal in zip(questions, source, quantized, same, strict=True)
        if not equal
    ]
    known = [index for index, question in enumerate(questions) if question.calls is not None]
    rows = [[reference_row(questions[i], outcomes[i]) for i in known] for outcomes in (source, quantized)]
    return {
        "num_samples": len(questions),
        "source": model_figures(questions, source),
        "quantized": model_figures(questions, quantized),
        "trigger": trigger_figures(source, quantized),
        "same_as_source": share(sum(same), len(same)),
        "differing": differing[:WORST],
        "reference": compare(*rows) if known else None,
    }

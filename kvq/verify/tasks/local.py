"""Tasks from JSON lines of one's own: tool calls and arithmetic, asked in the model's chat template."""

import re
from collections.abc import Sequence
from pathlib import Path

from kvq.verify.answers import Answer, Answerer, Watch
from kvq.verify.chat import ChatFormat
from kvq.verify.questions import Question, QuestionFile
from kvq.verify.tasks.stats import Row
from kvq.verify.toolcalls.ask import Outcome
from kvq.verify.toolcalls.calls import split_reasoning
from kvq.verify.toolcalls.formats import Parser, parser_of
from kvq.verify.toolcalls.score import reference_row

MAX_TOKENS = 16384
# A sign belongs to a number unless an expression ends before it: "7-5" holds 7 and 5.
NUMBER = re.compile(r"(?<![\w.)])-?\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")


def run_local(file: QuestionFile, answerer: Answerer, folder: Path, max_tokens: int, watch: Watch) -> list[Row]:
    """One model's rows on all questions that have a reference. Raises CalibrationError, CheckpointError, ServerError.

    `folder` has the tokenizer and chat template, wherever the model runs.
    """
    chat = ChatFormat(folder)
    parser = parser_of(folder) if file.kind == "tool-calls" else None
    questions = [one for one in file.questions if one.number is not None or one.calls is not None]
    prompts = [chat.encode(chat.render(one.messages, one.tools, f"{file.name}, {one.id}")) for one in questions]
    answers = answerer.generate(prompts, max_tokens, (), watch)
    return [judge(one, answer, parser) for one, answer in zip(questions, answers, strict=True)]


def judge(question: Question, answer: Answer, parser: Parser | None) -> Row:
    """The answer as far as it counts, and whether it is right."""
    if question.number is not None:
        found = last_number(answer.text)
        said = "" if found is None else f"{found:g}"
        return Row(question.id, said, found == question.number, answer.cut)
    assert parser is not None
    return reference_row(question, Outcome(parser(answer.text, question.tools), answer.cut))


def last_number(text: str) -> float | None:
    """The last number after the reasoning: what the harness calls flexible extraction, without its dollar signs."""
    found: Sequence[str] = NUMBER.findall(split_reasoning(text)[1])
    return float(found[-1].replace(",", "")) if found else None

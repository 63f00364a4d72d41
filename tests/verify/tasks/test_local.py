"""Local tasks: what counts as an answer, and whole runs through `kvq tasks` and `kvq tool-calls`."""

import pytest

from kvq.verify.answers import Answer, before_stop
from kvq.verify.questions import Question
from kvq.verify.tasks.local import judge, last_number
from kvq.verify.toolcalls.calls import ToolCall
from kvq.verify.toolcalls.glm import parse_glm


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 * 2 = 24. #### 24", 24),
        ("The answer is 1,234.50.", 1234.5),
        ("It is -3", -3),
        ("7-5", 5),
        ("about (-2)", -2),
        ("<think>It could be 99</think>Seven, so 7.", 7),
        ("99</think>none", None),
        ("", None),
        ("no digits", None),
        ("x = 3.0", 3),
        ("**42**", 42),
    ],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_judging() -> None:
    sum_ = Question("a", [], number=24.0)
    assert judge(sum_, Answer("12 * 2 = 24", False), None).correct
    row = judge(sum_, Answer("12 * 2 = 2", True), None)
    assert (row.correct, row.cut, row.answer) == (False, True, "2")
    tool = Question("b", [], calls=(ToolCall("f", {"x": 1}),))
    said = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    assert judge(tool, Answer(said, False), parse_glm).correct
    assert not judge(tool, Answer(said + "<tool_call>", False), parse_glm).correct
    assert not judge(tool, Answer("I cannot.", False), parse_glm).correct


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("abcd", ["c"], "ab"),
        ("abcd", ["d", "b"], "a"),
        ("abcd", [], "abcd"),
        ("abcd", [""], "abcd"),
        ("abcd", ["x"], "abcd"),
    ],
)
def test_before_stop(text: str, stop: list[str], kept: str) -> None:
    assert before_stop(text, stop) == kept

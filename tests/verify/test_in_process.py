"""Answers of a trained model in this process: known calls, cuts, stop texts, scores against the logits."""

from pathlib import Path

import pytest
import torch

from kvq.errors import CalibrationError, CheckpointError
from kvq.verify.answers import Answer
from kvq.verify.chat import ChatFormat, stop_ids
from kvq.verify.in_process import InProcess
from kvq.verify.models import check_same_prompts, one_source
from kvq.verify.questions import load_questions
from kvq.verify.toolcalls.ask import ask_text
from kvq.verify.toolcalls.formats import parser_of
from tests.runs import Shared

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINED = EXAMPLES / "tiny-glm-5-fp8"


def ignore(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def model() -> InProcess:
    return InProcess(TRAINED, torch.device("cpu"))


@pytest.fixture(scope="module")
def prompt(model: InProcess) -> list[int]:
    question = load_questions(EXAMPLES / "tool-calls.jsonl", 1).questions[0]
    return model.chat.encode(model.chat.render(question.messages, question.tools, "test"))


@pytest.mark.parametrize("rows", [slice(0, 3), slice(33, 36)], ids=["short tools", "schemas"])
def test_the_trained_model_calls_the_tools_of_the_examples(model: InProcess, rows: slice) -> None:
    questions = load_questions(EXAMPLES / "tool-calls.jsonl").questions[rows]
    outcomes = ask_text(questions, model, ChatFormat(TRAINED), parser_of(TRAINED), 100, ignore)
    assert [one.parsed.calls for one in outcomes] == [question.calls for question in questions]
    assert not any(one.cut or one.parsed.problems for one in outcomes)


def test_cut_and_stopped(model: InProcess, prompt: list[int]) -> None:
    (whole,) = model.generate([prompt], 100, (), ignore)
    assert not whole.cut and whole.text.startswith("<tool_call>") and whole.text.endswith("</tool_call>")
    (cut,) = model.generate([prompt], 3, (), ignore)
    assert cut.cut and whole.text.startswith(cut.text)
    (stopped,) = model.generate([prompt], 100, ["<arg_value>"], ignore)
    assert stopped == Answer(whole.text.split("<arg_value>")[0], cut=False)


def test_a_score_is_the_sum_of_the_greedy_steps(model: InProcess, prompt: list[int]) -> None:
    steps = [logits.log_softmax(-1) for logits in model.steps(prompt, 4)]
    greedy = [int(step.argmax()) for step in steps]
    other = [*greedy[:3], int(steps[3].topk(2).indices[1])]
    scores = model.score([(prompt, greedy), (prompt, other)], ignore)
    for (value, is_greedy), ids, wanted in zip(scores, (greedy, other), (True, False), strict=True):
        expected = sum(float(step[token]) for step, token in zip(steps, ids, strict=True))
        assert value == pytest.approx(expected, abs=1e-3) and is_greedy is wanted


def test_no_room_for_an_answer(model: InProcess, prompt: list[int]) -> None:
    with pytest.raises(CalibrationError, match="leaves no room"):
        model.generate([prompt * (model.context // len(prompt) + 1)], 5, (), ignore)


def test_logits_that_are_not_finite(model: InProcess, prompt: list[int]) -> None:
    weight = model.model.lm_head.weight
    kept = weight[0].clone()
    weight[0] = torch.nan
    try:
        with pytest.raises(CalibrationError, match="NaN or Inf"):
            model.generate([prompt], 5, (), ignore)
        with pytest.raises(CalibrationError, match="NaN or Inf"):
            model.score([(prompt, [1])], ignore)
    finally:
        weight[0] = kept


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ('{"eos_token_id": [1, 2]}', "{}", {1, 2}),
        ('{"x": 1}', '{"eos_token_id": 3}', {3}),
        (None, '{"eos_token_id": 4}', {4}),
    ],
)
def test_stop_ids(tmp_path: Path, generation: str | None, config: str, ids: set[int]) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    (tmp_path / "config.json").write_text(config)
    assert stop_ids(tmp_path) == ids


@pytest.mark.parametrize("config", ["{}", "[", "[1]", '{"eos_token_id": "x"}', '{"eos_token_id": []}'])
def test_no_stop_ids(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError):
        stop_ids(tmp_path)


def test_a_model_whose_calls_are_unknown(shared: Shared) -> None:
    with pytest.raises(CheckpointError, match="does not know how deepseek_v3 writes tool calls"):
        parser_of(shared.source("deepseek-v3"))


def test_other_tokens_are_noticed(shared: Shared) -> None:
    from kvq.errors import VerificationError

    check_same_prompts(shared.source("glm-5"), shared.source("glm-4.7"))
    with pytest.raises(VerificationError, match="different tokens"):
        check_same_prompts(shared.source("glm-5"), shared.source("kimi-k2"))


def test_one_way_to_the_source() -> None:
    from kvq.errors import RecipeError

    one_source("s", None, None, None)
    one_source(None, None, None, "f")
    for given in ((None, None, None, None), ("s", "u", None, None), ("s", None, "a", None), ("s", None, None, "f")):
        with pytest.raises(RecipeError):
            one_source(*given)

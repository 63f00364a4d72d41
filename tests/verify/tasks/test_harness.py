"""lm-evaluation-harness over scripted answers, without a network: its prompts, the figure read, what is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvq.errors import HubError
from kvq.verify.answers import Answer, Watch
from kvq.verify.chat import ChatFormat
from kvq.verify.tasks import harness
from kvq.verify.tasks.presets import PRESETS
from kvq.verify.tasks.stats import Row
from tests.runs import Shared


def ignore(text: str) -> None:
    pass


class Scripted:
    """Answers by prompt; remembers what it was asked."""

    place, context = "scripted", 4096

    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self.prompts: list[str] = []
        self.asked: list[tuple[int, tuple[str, ...]]] = []
        self.pairs: list[tuple[str, str]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[str], watch: Watch
    ) -> list[Answer]:
        self.asked.append((max_tokens, tuple(stop)))
        self.prompts = [self.chat.decode(prompt) for prompt in prompts]
        # right, wrong, right inside the reasoning only, cut off
        texts = ["<think>Question: 1</think>It is $1,000.", "#### 3", "<think>4</think>It is four.", "6 and so on"]
        return [Answer(text, cut=text.startswith("6")) for text in texts]

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], watch: Watch) -> list[tuple[float, bool]]:
        self.pairs = [(self.chat.decode(prompt), self.chat.decode(continuation)) for prompt, continuation in pairs]
        # " a long answer" has the best sum per letter, " no" the best sum
        return [({" no": -2.0, " yes": -6.0, " a long answer": -3.0}[text], False) for _, text in self.pairs]


@pytest.fixture
def scripted(shared: Shared) -> Scripted:
    return Scripted(ChatFormat(shared.source("glm-4.7")))


def data_set(folder: Path, config: str, rows: Sequence[dict[str, Any]]) -> Path:
    """A copy of a Hub data set: splits as JSON lines, named by the card's metadata."""
    folder.mkdir()
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


def test_gsm8k_in_the_chat_template(tmp_path: Path, scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"q{i}", "answer": f"because\n#### {answer}"} for i, answer in enumerate((1000, 2, 4, 6, 9))]
    data = data_set(tmp_path / "gsm8k", "main", rows)
    found = harness.run_preset(
        PRESETS["gsm8k"], scripted, scripted.chat, limit=4, max_tokens=77, data=data, watch=ignore
    )  # fmt: skip
    assert [replace(row, id=row.id.split("#")[0]) for row in found] == [
        Row("gsm8k/0", "$1,000.", True, False),
        Row("gsm8k/1", "3", False, False),
        Row("gsm8k/2", "[invalid]", False, False),
        Row("gsm8k/3", "6", True, True),
    ]
    assert scripted.asked == [(77, ())]  # the harness's own 256 tokens and its stop texts would cut reasoning off
    for number, prompt in enumerate(scripted.prompts):
        assert prompt.count("<|user|>") == 6 and prompt.endswith(f"Question: q{number}\nAnswer:<|assistant|>\n")
    again = Scripted(scripted.chat)
    harness.run_preset(PRESETS["gsm8k"], again, again.chat, limit=4, max_tokens=77, data=data, watch=ignore)
    assert again.prompts == scripted.prompts  # the same examples for the second model
    changed = data_set(tmp_path / "other", "main", [{**row, "question": row["question"] + "?"} for row in rows])
    other = harness.run_preset(PRESETS["gsm8k"], again, again.chat, limit=4, max_tokens=77, data=changed, watch=ignore)
    assert {row.id for row in other}.isdisjoint(row.id for row in found)


def test_arc_by_log_probabilities(tmp_path: Path, scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    choices = {"text": ["no", "yes", "a long answer"], "label": ["A", "B", "C"]}
    rows = [{"id": str(i), "question": f"q{i}", "choices": choices, "answerKey": key} for i, key in enumerate("ACB")]
    found = harness.run_preset(
        PRESETS["arc_easy"], scripted, scripted.chat, limit=None, max_tokens=1, watch=ignore,
        data=data_set(tmp_path / "arc", "ARC-Easy", rows),
    )  # fmt: skip
    assert [(row.id.split("#")[0], row.answer, row.correct) for row in found] == [
        ("arc_easy/0", "2", False), ("arc_easy/1", "2", True), ("arc_easy/2", "2", False),
    ]  # fmt: skip
    assert scripted.pairs[0] == ("Question: q0\nAnswer:", " no") and len(scripted.pairs) == 9


def test_a_folder_without_the_data_set(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"gsm8k: its data set openai/gsm8k cannot be had.*--data gsm8k=FOLDER"):
        harness.load_tasks(PRESETS["gsm8k"], tmp_path / "nothing")


@pytest.mark.parametrize(("name", "count"), [("mmlu", 57), ("mmlu_pro", 14), ("arc_challenge", 1), ("humaneval", 1)])
def test_a_preset_is_these_tasks_of_the_harness(name: str, count: int) -> None:
    from lm_eval.tasks import TaskManager

    folder = Path(str(harness._harness().tasks.__file__)).parent / PRESETS[name].folder
    names = harness.leaves(TaskManager(include_defaults=False, include_path=str(folder)).task_index, name)
    assert len(set(names)) == len(names) == count

"""A set of tasks on one model, and on two side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvq.checkpoint.index import load_json
from kvq.errors import CalibrationError, RecipeError
from kvq.verify.answers import Answerer, Watch
from kvq.verify.chat import ChatFormat
from kvq.verify.questions import QuestionFile, load_questions
from kvq.verify.report_file import require
from kvq.verify.tasks.local import MAX_TOKENS, run_local
from kvq.verify.tasks.presets import PRESETS, Preset
from kvq.verify.tasks.stats import Row, compare

ANSWERS_SCHEMA = "kvq.task-answers/1"


@dataclass(frozen=True, slots=True)
class Task:
    """A preset or a file, with everything that both models are asked under."""

    name: str
    what: Preset | QuestionFile
    limit: int | None
    max_tokens: int
    data: Path | None = None

    def settings(self, route: str) -> dict[str, Any]:
        """What must be equal for two sets of answers to be compared."""
        common = {"limit": self.limit, "max_tokens": self.max_tokens, "temperature": 0, "route": route}
        if isinstance(self.what, QuestionFile):
            metric = "exact calls" if self.what.kind == "tool-calls" else "last number"
            return {"data": self.what.name, "data_sha256": self.what.sha256, "metric": metric, **common}
        from kvq.verify.tasks.harness import version

        return {
            "data": self.what.data_set, "metric": f"{self.what.metric}, {self.what.filter}",
            "chat_template": self.what.chat, "lm_eval": version(), **common,
        }  # fmt: skip

    def rows(self, answerer: Answerer, folder: Path, watch: Watch) -> list[Row]:
        """One model's answers."""
        if isinstance(self.what, QuestionFile):
            return run_local(self.what, answerer, folder, self.max_tokens, watch)
        from kvq.verify.tasks.harness import run_preset

        return run_preset(
            self.what, answerer, ChatFormat(folder), limit=self.limit, max_tokens=self.max_tokens, data=self.data,
            watch=watch,
        )  # fmt: skip


def choose_tasks(
    names: Sequence[str], limit: int | None, max_tokens: int | None, data: Mapping[str, Path], *, allow_code: bool
) -> list[Task]:
    """Presets by name, files by path. Raises RecipeError, CalibrationError."""
    unknown = set(data) - set(names)
    if unknown:
        raise RecipeError(f"--data {sorted(unknown)[0]}=...: no --task of that name.")
    tasks = []
    for name in names:
        if name in PRESETS:
            preset = PRESETS[name]
            if preset.code and not allow_code:
                raise RecipeError(
                    f"{name} runs the model's answers as programs on this machine; allow it: --allow-code."
                )
            _expect_harness()
            tasks.append(Task(name, preset, limit, max_tokens or preset.max_tokens, data.get(name)))
        elif Path(name).is_file():
            tasks.append(Task(Path(name).stem, load_questions(Path(name), limit), limit, max_tokens or MAX_TOKENS))
        else:
            raise RecipeError(f"--task {name}: neither a file nor one of {', '.join(PRESETS)}.")
    if len({task.name for task in tasks}) != len(tasks):
        raise RecipeError("two --task have one name; their reports would overwrite each other.")
    return tasks


def _expect_harness() -> None:
    """Raise RecipeError now, not after the models have been loaded."""
    from kvq.verify.tasks.harness import version

    version()


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """One model's rows on one task."""

    settings: Mapping[str, Any]
    rows: tuple[Row, ...]


def answer_tasks(
    tasks: Sequence[Task], answerer: Answerer, folder: Path, route: str, watch: Watch
) -> dict[str, TaskAnswers]:
    """All tasks on one model. `folder` has the tokenizer."""
    answers = {}
    for task in tasks:
        rows = tuple(task.rows(answerer, folder, _named(watch, task.name)))
        if not rows:
            raise CalibrationError(f"{task.name}: no row has a reference answer.")
        answers[task.name] = TaskAnswers(task.settings(route), rows)
    return answers


def _named(watch: Watch, name: str) -> Watch:
    return lambda text: watch(f"{name}: {text}")


def compare_answers(source: Mapping[str, TaskAnswers], quantized: Mapping[str, TaskAnswers]) -> dict[str, Any]:
    """A report's `tasks`. Raises RecipeError for answers to other questions or under other settings."""
    tasks = {}
    for name, ours in quantized.items():
        theirs = source.get(name)
        if theirs is None:
            raise RecipeError(f"the source's answers hold no {name}; save them with the same --task.")
        differing = [key for key in ours.settings if ours.settings[key] != theirs.settings.get(key)]
        if differing:
            raise RecipeError(
                f"{name}: {differing[0]} was {theirs.settings.get(differing[0])!r} for the source and is "
                f"{ours.settings[differing[0]]!r} now; figures compare only under the same settings."
            )
        if [row.id for row in theirs.rows] != [row.id for row in ours.rows]:
            raise RecipeError(f"{name}: the source's answers are to other questions.")
        tasks[name] = {
            "num_samples": len(ours.rows), **compare(theirs.rows, ours.rows), "settings": dict(ours.settings),
        }  # fmt: skip
    return tasks


def answers_document(model: str, answers: Mapping[str, TaskAnswers]) -> dict[str, Any]:
    """Answers as JSON, to compare with later: source and quantized often cannot be served at one time."""
    return {
        "schema": ANSWERS_SCHEMA,
        "model": model,
        "tasks": {
            name: {"settings": dict(one.settings), "rows": [asdict(row) for row in one.rows]}
            for name, one in answers.items()
        },
    }


def read_answers(path: Path) -> dict[str, TaskAnswers]:
    """What `answers_document` gave. Raises VerificationError for anything else, CheckpointError for no JSON."""
    document = require(load_json(path), ANSWERS_SCHEMA, path)
    answers = {}
    for name, one in require(document.get("tasks"), None, path, "tasks").items():
        task = require(one, None, path, f"tasks.{name}")
        rows = [require(row, None, path, f"a row of {name}") for row in task.get("rows") or ()]
        answers[str(name)] = TaskAnswers(
            require(task.get("settings"), None, path, f"tasks.{name}.settings"),
            tuple(
                Row(str(row.get("id")), str(row.get("answer")), row.get("correct") is True, row.get("cut") is True)
                for row in rows
            ),
        )
    return answers


def missed_recovery(tasks: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    """A sentence for each limit that is missed. A limit on a task that was not run, or without a recovery, is."""
    missed = []
    for name, limit in limits.items():
        found = tasks.get(name, {}).get("recovery")
        if found is None:
            missed.append(f"{name}: recovery was not measured, at least {limit:g} % is wanted")
        elif not found >= limit:
            missed.append(f"{name}: recovery is {found:.2f} %, at least {limit:g} % is wanted")
    return missed

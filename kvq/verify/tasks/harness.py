"""lm-evaluation-harness (extra `kvq[eval]`): its tasks, prompts, filters and metrics over kvq's answerers.

One of its two doors. The harness asks; the answers come from this process or from a server, the same tokens either way.
"""

import logging
import os
from pathlib import Path
from typing import Any

from kvq.checkpoint.hub import hub_errors
from kvq.errors import CalibrationError, HubError, RecipeError
from kvq.verify.answers import Answerer, Watch
from kvq.verify.chat import ChatFormat
from kvq.verify.tasks.presets import Preset
from kvq.verify.tasks.stats import Row

ANSWER_LENGTH = 200  # of an answer's text in reports


def version() -> str:
    """The harness's, for reports. Raises RecipeError where it is not installed."""
    return str(_harness().__version__)


def _harness() -> Any:
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        import lm_eval
        import lm_eval.tasks
    except ImportError as error:
        raise RecipeError(f"tasks by name need lm-evaluation-harness: pip install 'kvq[eval]' ({error}).") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval


def run_preset(
    preset: Preset, answerer: Answerer, chat: ChatFormat, *, limit: int | None, max_tokens: int, data: Path | None,
    watch: Watch,
) -> list[Row]:  # fmt: skip
    """One model's rows. `limit` counts rows of each of the harness's tasks (MMLU has 57). Raises HubError when the data
    set cannot be had, RecipeError without the harness, CalibrationError for no rows, and what the answerer raises."""
    _harness()
    from lm_eval.evaluator import evaluate

    from kvq.verify.tasks.harness_model import HarnessModel

    tasks = load_tasks(preset, data)
    _leave_length_open(preset, tasks)
    model = HarnessModel(answerer, chat, max_tokens, watch)
    if preset.code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    result = evaluate(
        model, {"tasks": tasks}, limit=limit, bootstrap_iters=0, log_samples=True, apply_chat_template=preset.chat,
        fewshot_as_multiturn=preset.chat, confirm_run_unsafe_code=preset.code,
    )  # fmt: skip
    rows = [
        _row(name, sample, preset, model)
        for name, samples in sorted(result["samples"].items())
        for sample in samples
        if sample["filter"] == preset.filter
    ]
    if not rows:
        raise CalibrationError(f"{preset.name}: the data set holds no rows.")
    return rows


def load_tasks(preset: Preset, data: Path | None) -> dict[str, Any]:
    """The harness's tasks with their data. Raises HubError."""
    from lm_eval.tasks import TaskManager

    definitions = Path(str(_harness().tasks.__file__)).parent / preset.folder  # of 15,000: reading all takes a minute
    manager = TaskManager(include_defaults=False, include_path=str(definitions))
    changed = {} if data is None else {"dataset_path": str(data.absolute())}
    members = [{"task": name, **changed} for name in leaves(manager.task_index, preset.name)]
    try:
        with hub_errors(preset.data_set):
            tasks: dict[str, Any] = manager.load([{"group": "kvq", "task": members}])["tasks"]
    except (HubError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split(". What has arrived")[0].split())[:200]
        raise HubError(
            f"{preset.name}: its data set {preset.data_set} cannot be had from {data or 'the Hub'} ({reason}). "
            f"Without a network give a folder that holds a copy of the Hub's: --data {preset.name}=FOLDER."
        ) from None
    for task in tasks.values():
        task.set_config("num_fewshot", task.get_config("num_fewshot") or 0)
        task.set_fewshot_seed(seed=1234)
    return tasks


def leaves(index: Any, name: str) -> list[str]:
    """Tasks below a group or tag, in the harness's order."""
    entry = index[name]
    kind = entry.kind.name
    if kind == "GROUP":
        return [leaf for child in entry.cfg["task"] for leaf in leaves(index, child)]
    if kind == "TAG":
        return sorted(entry.tags)
    return [name]


def _leave_length_open(preset: Preset, tasks: dict[str, Any]) -> None:
    for task in tasks.values():
        if preset.chat:
            task.set_config("generation_kwargs", {"until": [], "do_sample": False})


def _row(task: str, sample: dict[str, Any], preset: Preset, model: Any) -> Row:
    if len(sample["resps"]) > 1:
        answer = str(_chosen(sample, preset.metric))
    else:
        filtered = sample["filtered_resps"][0]
        answer = str(filtered[0] if isinstance(filtered, list) and filtered else filtered)[:ANSWER_LENGTH]
    prompt = sample["arguments"][0][0]
    name = f"{task}/{sample['doc_id']}#{sample['doc_hash'][:8]}"  # answers to another edition of the data are noticed
    return Row(name, answer, bool(sample[preset.metric]), model.cut.get(prompt, False))


def _chosen(sample: dict[str, Any], metric: str) -> int:
    """The choice of the highest log probability, per letter for acc_norm (the text is a space and the choice)."""
    scores = [float(response[0][0]) for response in sample["resps"]]
    if metric == "acc_norm":
        scores = [score / max(1, len(text) - 1) for score, (_, text) in zip(scores, sample["arguments"], strict=True)]
    return scores.index(max(scores))

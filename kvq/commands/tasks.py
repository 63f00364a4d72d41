"""`kvq tasks`: benchmarks and question files, source and quantized side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvq.commands.options import Device, Json, path_argument, path_option, print_json
from kvq.errors import GateError, RecipeError

if TYPE_CHECKING:
    from kvq.verify.answers import Watch
    from kvq.verify.tasks.run import Task, TaskAnswers


def tasks(
    folder: Annotated[Path, path_argument("A quantized checkpoint; its tokenizer makes the prompts.")],
    task: Annotated[
        list[str], typer.Option(help="gsm8k, arc_easy, arc_challenge, mmlu, mmlu_pro, humaneval or a JSONL file.")
    ],
    source: Annotated[Path | None, path_option("The checkpoint it was made from, run in this process.")] = None,
    server: Annotated[str | None, typer.Option(help="Address of a server that has FOLDER.")] = None,
    source_server: Annotated[str | None, typer.Option(help="Address of a server that has the source.")] = None,
    save_answers: Annotated[Path | None, path_option("Ask FOLDER alone; write its answers there.")] = None,
    source_answers: Annotated[Path | None, path_option("The source's answers, from --save-answers.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each task at most (of each MMLU subject).")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer at most; by default enough for reasoning.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="TASK=FOLDER: a local copy of a task's data set.")] = None,
    min_recovery: Annotated[list[str] | None, typer.Option(help="TASK=PERCENT: exit with 10 below it.")] = None,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Let humaneval run the answers here.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to a server at a time.")] = 16,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Ask two models the same questions: scores with intervals, flips, recovery. Writes kvq-reports/tasks-*.json."""
    from kvq.console import show_tasks, stages
    from kvq.verify.models import check_same_prompts, one_source
    from kvq.verify.report_files import TASKS, report_folder, write_json, write_report
    from kvq.verify.tasks import run

    one_source(source, source_server, source_answers, save_answers)
    limits = {name: _percent(name, value) for name, value in _pairs("--min-recovery", min_recovery).items()}
    copies = {name: Path(value) for name, value in _pairs("--data", data).items()}
    chosen = run.choose_tasks(task, limit, max_tokens, copies, allow_code=allow_code)
    _check_names(limits, chosen)
    theirs = run.read_answers(source_answers) if source_answers else None
    if source is not None:
        check_same_prompts(folder, source)
    with stages() as stage:
        if source is not None or source_server is not None:
            theirs = _ask(chosen, source or folder, source_server, device, concurrency, stage)
        ours = _ask(chosen, folder, server, device, concurrency, stage)
    if save_answers is not None:
        write_json(save_answers, run.answers_document(folder.absolute().name, ours))
        typer.echo(str(save_answers))
        return
    assert theirs is not None, "one_source has seen to it"
    figures = run.compare_answers(theirs, ours)
    for name, row in figures.items():
        write_report(report_folder(folder), f"tasks-{name}", TASKS, folder, {"tasks": {name: row}})
    if as_json:
        print_json({"tasks": figures})
    else:
        show_tasks(figures)
    missed = run.missed_recovery(figures, limits)
    if missed:
        raise GateError(f"{folder}: " + "; ".join(missed) + ".")


def _ask(
    chosen: "Sequence[Task]", folder: Path, url: str | None, device: str, concurrency: int, watch: "Watch"
) -> "dict[str, TaskAnswers]":
    from kvq.verify.models import opened
    from kvq.verify.tasks.run import answer_tasks

    watch(f"opening {url or folder}")
    with opened(folder, url, device, concurrency) as (answerer, route):
        return answer_tasks(chosen, answerer, folder, route, lambda text: watch(f"{folder.name}: {text}"))


def _pairs(flag: str, values: list[str] | None) -> dict[str, str]:
    pairs = {}
    for value in values or []:
        name, sign, rest = value.partition("=")
        if not sign or not name or not rest:
            raise RecipeError(f"{flag} {value}: expected TASK=VALUE.")
        pairs[name] = rest
    return pairs


def _percent(name: str, value: str) -> float:
    try:
        percent = float(value)
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 1000:
        raise RecipeError(f"--min-recovery {name}={value}: expected a percentage, such as 99.")
    return percent


def _check_names(limits: dict[str, float], chosen: "Sequence[Task]") -> None:
    """A gate on a task that is not asked would pass or fail for nothing: say so before hours of work."""
    names = [one.name for one in chosen]
    for name in limits:
        if name not in names:
            raise RecipeError(f"--min-recovery {name}=...: no --task of that name; there are {', '.join(names)}.")

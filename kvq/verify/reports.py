"""From an evaluation to its files: which gates apply, where the reports go, and their plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvq.checkpoint.index import MANIFEST_NAME, load_json
from kvq.recipes.schema import Gates, make_gates_from
from kvq.verify.evaluation import Evaluation, Request
from kvq.verify.gates import GateResult, check_gates, merge_gates
from kvq.verify.report_file import find_report, find_tasks
from kvq.verify.report_files import DAMAGE, DISTANCE, HEAD, KV, TASKS, report_folder, write_report


@dataclass(frozen=True, slots=True)
class Written:
    """`content` is everything as one object, `notes` what a person should know of the files."""

    content: dict[str, Any]
    notes: list[str]


def judge(request: Request, found: Evaluation, flags: Gates) -> list[GateResult]:
    """Results of the gates in the checkpoint's manifest and on the command line, which come first.

    Raises CheckpointError for gates in a manifest that kvq does not write.
    """
    gates = merge_gates(_recipe_gates(request.folder), flags)
    reports = find_tasks(report_folder(request.folder), TASKS) if gates.min_recovery else []
    tasks = {name: task.value for report in reports for name, task in report.items("tasks")}
    return check_gates(gates, found.figures, tasks)


def _recipe_gates(folder: Path) -> Gates | None:
    path = folder / MANIFEST_NAME
    if not path.exists():
        return None
    recipe = load_json(path).get("recipe")
    gates = recipe.get("gates") if isinstance(recipe, dict) else None
    return None if gates is None else make_gates_from(gates, f"{path}: recipe.gates")


def write_reports(request: Request, found: Evaluation, gates: Sequence[GateResult], place: Path | None) -> Written:
    """`distance.json` and `damage.json`; with an FP8 KV cache `kv.json` and `damage-<dtype>.json`; and plots.

    The source's own folder is only written to when it is named: it is not kvq's. Raises OutputError.
    """
    distance = {**found.distance, "gates": [result.as_dict() for result in gates]}
    content = {"distance": distance, "damage": found.damage, "kv": found.kv}
    if place is None and request.folder.samefile(request.source):
        return Written(content, ["no reports were written into the source's folder; --report DIR gives them a place"])
    folder = place or report_folder(request.folder)
    dtype = request.kv_dtype
    if dtype is None:
        paths = [write_report(folder, "distance", DISTANCE, request.folder, distance)]
    else:
        paths = [_add_to_kv(folder, request.folder, dtype, {"distance": distance, "stored": found.kv})]
    suffix = "" if dtype is None else f"-{dtype}"
    if found.damage is not None:
        paths.append(write_report(folder, f"damage{suffix}", DAMAGE, request.folder, found.damage))
    drawn, note = _draw(folder, found, suffix)
    names = ", ".join([*(path.name for path in paths), *drawn])
    return Written(content, [f"wrote {names} to {folder}", *note])


def _add_to_kv(folder: Path, checkpoint: Path, dtype: str, row: dict[str, Any]) -> Path:
    """`kv.json` is shared with what calibrated the scales: only this dtype's simulation is replaced."""
    before = find_report(folder, "kv", KV)
    kept = {} if before is None else {key: value for key, value in before.value.items() if key not in HEAD}
    simulations = {} if before is None or "simulations" not in kept else dict(before.items("simulations"))
    rows = {name: simulation.value for name, simulation in simulations.items()}
    return write_report(folder, "kv", KV, checkpoint, {**kept, "simulations": {**rows, dtype: row}})


def _draw(folder: Path, found: Evaluation, suffix: str) -> tuple[list[str], list[str]]:
    """Plots where matplotlib is there; what to install where it is not."""
    if find_spec("matplotlib") is None:
        return [], ["no plots: matplotlib is not installed (pip install 'kvq[plots]')"]
    from kvq.verify.plots import draw

    return draw(folder, found.distance, found.damage, suffix), []

"""A run as a person sees it: what will be done, progress with an ETA, and the closing tables."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvq.console.plan import show_ranks
from kvq.console.screen import ERR, OUT, clock, short_size, size
from kvq.recipes.plan import REASONS, QuantPlan

if TYPE_CHECKING:  # torch behind them; a plan must not load it
    from kvq.verify.report import VerifyReport


class RunProgress:
    """Layer, stage and time left: a bar on a terminal, a line per layer elsewhere, nothing when quiet."""

    def __init__(self, quiet: bool) -> None:
        self._started = time.monotonic()
        self._lines = not quiet and not ERR.is_terminal
        columns = (
            SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
        )  # fmt: skip
        self._bar = Progress(*columns, console=ERR, transient=True) if not quiet and ERR.is_terminal else None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, layer: int | None, num_layers: int, text: str) -> None:
        description = text if layer is None else f"layer {layer}: {text}"
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(description, total=num_layers, eta="")
        self._bar.update(self._task, description=description)

    def layer_done(self, layer: int, num_layers: int) -> None:
        elapsed = time.monotonic() - self._started
        left = elapsed / (layer + 1) * (num_layers - layer - 1)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=layer + 1, eta=f"about {clock(left)} left")
        if self._lines:
            ERR.print(f"layer {layer + 1}/{num_layers} done after {clock(elapsed)}, about {clock(left)} left")


def plan_dict(plan: QuantPlan, out: Path) -> dict[str, Any]:
    """The plan for `--dry-run --json`."""
    return {
        "out": str(out),
        "source_format": plan.source.title,
        "model_type": plan.facts.arch.model_type,
        "recipe": plan.recipe.model_dump(mode="json"),
        "recipe_sha256": plan.recipe.sha256,
        "pass_through": plan.pass_through,
        "num_quantized_modules": plan.num_modules,
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "classes": [{**row, "reason": REASONS[row["class"]]} for row in class_rows(plan)],
        "ranks": plan.rank_rows(),
        "warnings": list(plan.warnings),
        "quantization_config": plan.quantization_config,
    }


def class_rows(plan: QuantPlan) -> list[dict[str, Any]]:
    """Tensors grouped by class and what is done to them."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for tensor in plan.tensors.values():
        key = (tensor.tensor_class, tensor.action)
        row = rows.setdefault(
            key, {"class": key[0], "action": key[1], "tensors": 0, "output_bytes": 0, "dtypes": set()}
        )
        row["tensors"] += 1
        row["output_bytes"] += tensor.nbytes
        row["dtypes"].add(tensor.dtype)
    ordered = sorted(rows.values(), key=lambda row: -row["output_bytes"])
    return [{**row, "dtypes": sorted(row["dtypes"])} for row in ordered]


def show_plan(plan: QuantPlan, out: Path, console: Console) -> None:
    """What becomes INT4, what stays, bytes before and after. It is the result of a dry run, else words before a run."""
    words = {"pack": "INT4", "keep": "kept as it is", "dequantize": "to BF16"}
    console.print(f"{plan.facts.arch.title}, {plan.source.title} -> {out}", style="bold")
    table = Table(box=box.SIMPLE)
    for column in ("class", "tensors", "output", "what happens", "stored as"):
        table.add_column(column, justify="right" if column in ("tensors", "output") else "left", no_wrap=True)
    for row in class_rows(plan):
        what = words[row["action"]]
        if row["action"] == "pack":
            what = f"INT4 g{plan.recipe.group_size}, {plan.recipe.solver}"
        stored = " ".join(row["dtypes"])
        table.add_row(row["class"], str(row["tensors"]), short_size(row["output_bytes"]), what, stored)
    console.print(table)
    console.print(
        f"tensors before {size(plan.source_bytes)}, after {size(plan.output_bytes)}, "
        f"{plan.output_bytes / plan.source_bytes:.1%}"
    )
    rows = plan.rank_rows()
    if rows:
        show_ranks(rows, console)
    for warning in plan.warnings:
        console.print(f"note: {warning}")


def show_result(manifest: Mapping[str, Any], out: Path, seconds: float, peak: Mapping[str, int | None]) -> None:
    """The closing table of a run."""
    summary = manifest["summary"]
    table = Table(title=str(out), title_justify="left", show_header=False)
    table.add_row("size", f"{size(summary['source_bytes'])} -> {size(summary['output_bytes'])}")
    table.add_row("time", clock(seconds))
    on_device = f", device {size(peak['peak_device_bytes'])}" if peak["peak_device_bytes"] else ""
    table.add_row("peak memory", f"host {size(peak['peak_host_bytes'] or 0)}{on_device}")
    if summary["bits_per_weight"] is not None:
        table.add_row(
            "bits per weight", f"{summary['bits_per_weight']} in the {summary['num_quantized_modules']} expert matrices"
        )
        table.add_row("weight error", f"{summary['mean_relative_weight_error']:.4f} relative, mean")
    if summary["mean_relative_output_error"] is not None:
        table.add_row(
            "output error", f"{summary['mean_relative_output_error']:.4f} relative, mean over calibration inputs"
        )
    for row in summary["worst_modules"][:3]:
        table.add_row("worst", f"{row['name']}: {row['relative_output_error']:.4f} ({row['num_tokens']} tokens)")
    calibration = manifest["calibration"]
    if calibration is not None:
        asked = calibration["num_sequences_asked"]
        table.add_row(
            "calibrated on",
            f"{calibration['num_sequences']} of {asked} sequences x {calibration['sequence_length']} tokens, "
            f"{calibration['name']}",
        )
        few = f"{summary['num_experts_below_64_tokens']} of {summary['num_experts']} experts saw fewer than 64 tokens"
        table.add_row("coverage", few)
        for name, tokens in list(summary["experts_with_fewest_tokens"].items())[:3]:
            table.add_row("few tokens", f"{name}: {tokens} (solved mostly by its layer's statistics)")
    table.add_row("fallbacks", f"{summary['num_fallbacks']} modules rounded to nearest after a failed factorization")
    serving = manifest["serving"]
    table.add_row(
        "serve with",
        f"{' '.join(serving['flags']) or '(no extra flags)'}; tensor parallel {serving['tensor_parallel_sizes']}",
    )
    ERR.print(table)
    if calibration is not None and calibration["num_sequences"] < calibration["num_sequences_asked"]:
        ERR.print("note: the calibration data holds fewer sequences than the recipe asks for; all of it was used")


def show_models(rows: Sequence[Mapping[str, str]]) -> None:
    table = Table()
    for column in ("alias", "hub", "source", "recipe"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["alias"], row["hub"], row["source"], row["recipe"])
    OUT.print(table)


def show_verification(report: "VerifyReport") -> None:
    table = Table(title=report.folder, title_justify="left")
    for column in ("check", "result", "looked at", ""):
        table.add_column(column)
    for check in report.checks:
        detail = check.note or (check.problems[0] if check.problems else "")
        result = ("ok" if check.num_checked else "not checked") if check.passed else "FAILED"
        table.add_row(check.name, result, str(check.num_checked), detail)
    OUT.print(table)
    for name, error in report.worst_weight_errors[:3]:
        OUT.print(f"largest relative weight error: {name} {error:.4f}")

"""What a card says was measured: rows from the report files, None for what was not. No figure comes from elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq.verify.report_file import ReportFile, find_report, find_tasks
from kvq.verify.report_files import DISTANCE, KV, REPORTS, TASKS, TOOL_CALLS, report_folder

NOT_MEASURED = "not measured"
PLUS_MINUS = "\u00b1"


def distance_section(folder: Path) -> dict[str, Any] | None:
    """Distance of probabilities. Raises VerificationError for a report of other weights."""
    report = find_report(report_folder(folder), "distance", DISTANCE)
    if report is None:
        return None
    report.expect_weights_of(folder)
    figures = report.at("figures")
    data = [(row.text("name"), row.text("sha256"), row.count("num_documents")) for row in report.rows("data")]
    return {
        "positions": figures.count("num_positions"),
        "documents": figures.count("num_documents"),
        "data": data,
        "notes": [note.text() for note in report.rows("notes")],
        "rows": [
            ("mean KL divergence", _estimate(figures, "mean_kld", 5, " nats")),
            ("median KL divergence", _estimate(figures.at("percentile_kld"), "50", 5, " nats")),
            ("99th percentile", _estimate(figures.at("percentile_kld"), "99", 5, " nats")),
            ("maximum", _estimate(figures, "max_kld", 5, " nats")),
            ("same most likely token", _share(figures, "same_top_p")),
            ("perplexity of the source", _estimate(figures, "mean_ppl_base", 4)),
            ("perplexity of this model", _estimate(figures, "mean_ppl_q", 4)),
            ("ratio of the perplexities", _estimate(figures, "ppl_ratio", 5)),
        ],
        "domains": [
            (name, row.count("num_positions"), _estimate(row, "mean_kld", 5), _share(row, "same_top_p"))
            for name, row in report.items("domains")
        ],
    }


def _value_error(report: ReportFile, key: str) -> tuple[float | None, float | None]:
    """A figure and the larger of its standard errors: positions of one text are not independent."""
    found = report.at(key)
    if not isinstance(found.value, Mapping):
        return report.number(key), None
    errors = [found.number(name) for name in ("error", "document_error") if name in found.value]
    return found.number("value"), max((error for error in errors if error is not None), default=None)


def _estimate(report: ReportFile, key: str, digits: int, unit: str = "") -> str:
    value, error = _value_error(report, key)
    if value is None:
        return NOT_MEASURED
    return f"{value:.{digits}f}{unit}" if error is None else f"{value:.{digits}f} {PLUS_MINUS} {error:.{digits}f}{unit}"


def _share(report: ReportFile, key: str) -> str:
    value, error = _value_error(report, key)
    if value is None:
        return NOT_MEASURED
    return f"{100 * value:.2f} %" if error is None else f"{100 * value:.2f} {PLUS_MINUS} {100 * error:.2f} %"


def task_section(folder: Path) -> list[dict[str, Any]]:
    """A row for each task of all `tasks-*.json`, by name."""
    rows = []
    for report in find_tasks(report_folder(folder), TASKS):
        report.expect_weights_of(folder)
        rows += [_task_row(name, task) for name, task in report.items("tasks")]
    return sorted(rows, key=lambda row: str(row["name"]))


def _task_row(name: str, task: ReportFile) -> dict[str, Any]:
    recovery, error = task.number("recovery"), task.number("recovery_error")
    recovered = "undefined" if recovery is None else f"{recovery:.2f} %"
    return {
        "name": name,
        "samples": task.count("num_samples"),
        "source": interval_text(task.at("source")),
        "quantized": interval_text(task.at("quantized")),
        "recovery": recovered if error is None else recovered.replace(" %", f" {PLUS_MINUS} {error:.2f} %"),
        "lost": task.count("flips", "lost"),
        "gained": task.count("flips", "gained"),
        "cut": f"{task.count('source', 'cut')} / {task.count('quantized', 'cut')}",
        "limit": task.count("settings", "max_tokens"),
        "route": task.text("settings", "route"),
    }


def interval_text(share: ReportFile) -> str:
    """`99/100 (94.6 to 99.8 %)`"""
    bounds = [one.number() for one in share.rows("interval")]
    if len(bounds) != 2 or None in bounds:
        raise share.error(f"{share.place}.interval is not two numbers")
    low, high = (100 * float(bound or 0.0) for bound in bounds)
    return f"{share.count('correct')}/{share.count('total')} ({low:.1f} to {high:.1f} %)"


def tool_call_section(folder: Path) -> list[dict[str, Any]]:
    """A row for each way of asking."""
    report = find_report(report_folder(folder), "toolcalls", TOOL_CALLS)
    if report is None:
        return []
    report.expect_weights_of(folder)
    return [_tool_row(way, row) for way, row in report.items("ways")]


def _tool_row(way: str, row: ReportFile) -> dict[str, Any]:
    f1, valid, reference = row.number("trigger", "f1"), row.at("quantized", "schema_valid"), row.at("reference")
    return {
        "way": way,
        "samples": row.count("num_samples"),
        "f1": "undefined" if f1 is None else f"{f1:.4f}",
        "schema": "no calls" if valid.value is None else interval_text(valid),
        "same": interval_text(row.at("same_as_source")),
        "reference": "no reference" if reference.value is None else interval_text(reference.at("quantized")),
        "source_reference": "no reference" if reference.value is None else interval_text(reference.at("source")),
    }


def kv_section(folder: Path) -> dict[str, Any] | None:
    """Simulated cache types, and what calibration of scales has chosen."""
    report = find_report(report_folder(folder), "kv", KV)
    if report is None:
        return None
    simulations = []
    if "simulations" in report.value:
        for dtype, simulation in report.items("simulations"):
            figures = simulation.at("distance", "figures")
            simulations.append((dtype, figures.count("num_positions"), _estimate(figures, "mean_kld", 5, " nats"),
                                _share(figures, "same_top_p")))  # fmt: skip
    chosen = (report.text("chosen"), report.text("why")) if "chosen" in report.value else None
    delivery = [row.text("sentence") for row in report.rows("delivery")] if "delivery" in report.value else []
    return {"simulations": simulations, "chosen": chosen, "delivery": list(dict.fromkeys(delivery))}


def plots(folder: Path) -> list[str]:
    """Pictures that lie beside the reports, as paths in the repository."""
    return [f"{REPORTS}/{path.name}" for path in sorted(report_folder(folder).glob("*.png"))]

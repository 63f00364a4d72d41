"""Tasks and tool calls as tables: source and quantized side by side, and every answer that changed."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from kvq.console.screen import OUT

SHOWN = 10


def show_tasks(tasks: Mapping[str, Any]) -> None:
    """One row a task, then the flips."""
    table = Table(show_edge=False)
    for title in ("task", "source", "quantized", "recovery", "lost", "gained", "cut off"):
        table.add_column(title, justify="left" if title == "task" else "right", no_wrap=title == "task")
    for name, row in tasks.items():
        flips = row["flips"]
        table.add_row(
            name, share_text(row["source"]), share_text(row["quantized"]),
            percent_text(row["recovery"]), str(flips["lost"]), str(flips["gained"]),
            f"{row['source']['cut']} / {row['quantized']['cut']}",
        )  # fmt: skip
    OUT.print(table)
    for name, row in tasks.items():
        for flip in row["flips"]["rows"][:SHOWN]:
            OUT.print(f"{name}, {flip['id']}: {flip['source']} -> {flip['quantized']} ({flip['to']} now)")
        if row["flips"]["lost"] + row["flips"]["gained"] > SHOWN:
            OUT.print(f"{name}: the other flips are in the report")
        if row["source"]["cut"] or row["quantized"]["cut"]:
            OUT.print(
                f"note: {name}: answers were cut off at {row['settings']['max_tokens']} tokens; raise --max-tokens"
            )


def show_tool_calls(report: Mapping[str, Any]) -> None:
    """One table a way of asking."""
    for way, row in report["ways"].items():
        table = Table(
            title=f"{way}, {row['num_samples']} rows", title_justify="left", show_header=False, show_edge=False
        )
        trigger = row["trigger"]
        table.add_row(
            "calls a tool, source / quantized", f"{row['source']['triggered']} / {row['quantized']['triggered']}"
        )
        table.add_row(
            "trigger against the source",
            f"precision {_ratio(trigger['precision'])}, recall {_ratio(trigger['recall'])}, F1 {_ratio(trigger['f1'])}",
        )
        for title, side in (("source", row["source"]), ("quantized", row["quantized"])):
            table.add_row(f"arguments fit the schema, {title}", share_text(side["schema_valid"]))
        table.add_row("same as the source", share_text(row["same_as_source"]))
        if row["reference"] is not None:
            for title in ("source", "quantized"):
                table.add_row(f"exactly the reference, {title}", share_text(row["reference"][title]))
        table.add_row("cut off, source / quantized", f"{row['source']['cut']} / {row['quantized']['cut']}")
        OUT.print(table)
        for one in row["differing"][:SHOWN]:
            OUT.print(f"{one['id']}: {one['source']} -> {one['quantized']}")
    for side, rows in report["stream_differs"].items():
        if rows:
            OUT.print(f"note: {side}: streamed calls differ from plain ones in {len(rows)} rows, first {rows[0]}")


def share_text(share: Mapping[str, Any] | None) -> str:
    """`99/100 (94.6-99.8 %)`, the interval at 95 %."""
    if share is None:
        return "none"
    low, high = share["interval"]
    return f"{share['correct']}/{share['total']} ({100 * low:.1f}-{100 * high:.1f} %)"


def percent_text(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f} %"


def _ratio(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"

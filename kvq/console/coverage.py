"""A coverage report as a person sees it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from kvq.console.screen import OUT

COLUMNS = (
    "layer", "experts", "min / median / max", "none", "few", "borrowed", "weight error",
    "output error", "fallbacks",
)  # fmt: skip
SHOWN_EXPERTS = 8


def show_coverage(report: Mapping[str, Any], files: Sequence[str], note: str | None) -> None:
    """A line for each layer, the experts with the fewest tokens, and what was written."""
    table = Table(title=f"tokens of each expert; few: below {report['few_tokens']}", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in report["layers"]:
        table.add_row(*_layer_cells(row))
    OUT.print(table)
    seen = [row for row in report["experts"] if row["tokens"] is not None]
    for row in sorted(seen, key=lambda row: row["tokens"])[:SHOWN_EXPERTS]:
        outcomes = ", ".join(sorted({matrix["outcome"] for matrix in row["matrices"].values()}))
        borrowed = _share(max(matrix["blend_weight"] for matrix in row["matrices"].values()))
        OUT.print(
            f"layer {row['layer']} expert {row['expert']}: {row['tokens']} tokens, {borrowed} borrowed, {outcomes}"
        )
    if not seen:
        OUT.print("no calibration data were used: weights were rounded to nearest")
    OUT.print(f"written: {', '.join(files)}")
    if note is not None:
        OUT.print(f"note: {note}")


def _layer_cells(row: Mapping[str, Any]) -> list[str]:
    known = row["min_tokens"] is not None
    tokens = f"{row['min_tokens']} / {row['median_tokens']:.0f} / {row['max_tokens']}" if known else "-"
    few = [str(row[key]) if known else "-" for key in ("experts_without_tokens", "experts_with_few_tokens")]
    errors = [_number(row[key]) for key in ("mean_relative_weight_error", "mean_relative_output_error")]
    return [str(row["layer"]), str(row["experts"]), tokens, *few, _share(row["mean_blend_weight"]), *errors,
            str(row["fallbacks"])]  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"

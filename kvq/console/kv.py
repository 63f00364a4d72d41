"""The KV-cache report as a person sees it: a row for each layer, the decision, and what becomes of the scales."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from kvq.console.screen import OUT

SHOWN_LAYERS = 100


def show_kv_report(report: Mapping[str, Any], out: Path, files: Sequence[str]) -> None:
    """Statistics on calibration tokens, errors at 1.0 and at the calibrated scales, verdicts."""
    names = ["k_scale"] if report["attention"] != "gqa" else ["k_scale", "v_scale"]
    best = report["chosen"] if report["chosen"] != "one" else "amax"
    OUT.print(f"FP8 KV cache, {report['attention']}, on calibration tokens (1.0 beside {best}):")
    table = Table(box=box.SIMPLE, padding=(0, 1))
    for column in ("layer", "", "amax", "amax/448", "error", best, "over", best, "lost", best):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [(layer, name, row[name]) for layer, row in report["calibration_tokens"].items() for name in names]
    for layer, name, row in rows[:SHOWN_LAYERS]:
        one, other = row["variants"]["one"], row["variants"][best]
        shares = [
            f"{side[key]:.2%}"
            for key in ("relative_error", "saturated_share", "underflow_share")
            for side in (one, other)
        ]
        scale = row["variants"]["amax"]["scale"]
        table.add_row(layer, name[0] if len(names) > 1 else "kv", f"{row['amax']:.4g}", f"{scale:.4g}", *shares)
    OUT.print(table)
    if len(rows) > SHOWN_LAYERS:
        OUT.print(f"{len(rows) - SHOWN_LAYERS} more rows in kvq-reports/kv.json")
    _show_held_out(report["held_out"])
    OUT.print(f"chosen: {'1.0' if report['chosen'] == 'one' else report['chosen']} ({report['why']})")
    _show_delivery(report["delivery"])
    OUT.print(f"wrote {', '.join(files)} below {out}")


def _show_delivery(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each verdict: the groups of layers, the engines that share it, the reason once."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["verdict"], row["reason"]), []).append(row)
    words = {"used": "used by", "ignored": "ignored by", "withheld": "withheld: would corrupt in"}
    for (verdict, reason), members in groups.items():
        layers, engines = (list(dict.fromkeys(row[key] for row in members)) for key in ("layers", "engine"))
        OUT.print(f"{', '.join(layers)}: {words[verdict]} {', '.join(engines)}{': ' if reason else ''}{reason}")


def _show_held_out(held_out: Mapping[str, Any] | None) -> None:
    if held_out is None:
        return
    table = Table(
        title=f"{held_out['num_positions']} held-out positions of {held_out['num_documents']} documents",
        title_justify="left", box=box.SIMPLE,
    )  # fmt: skip
    for column in ("KV cache", "mean KL", "max KL", "perplexity"):
        table.add_column(column, justify="left" if column == "KV cache" else "right")
    for name, perplexity in held_out["perplexity"].items():
        kl, error = held_out["mean_kl"].get(name), held_out["mean_kl_error"].get(name)
        shown = ("", "") if kl is None else (f"{kl:.6f} +/- {error:.6f}", f"{held_out['max_kl'][name]:.4f}")
        title = {"bf16": "not quantized", "one": "FP8, 1.0"}.get(name, f"FP8, {name}")
        table.add_row(title, *shown, f"{perplexity:.4f}")
    OUT.print(table)

"""What was lost, as a person reads it: llama.cpp's rows, where the damage is, gates."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from kvq.console.screen import OUT

if TYPE_CHECKING:  # torch behind them
    from kvq.verify.evaluation import Evaluation
    from kvq.verify.gates import GateResult

PLUS_MINUS = "\u00b1"
SHOWN_WORST = 3
FIGURES = (
    ("Mean PPL(Q)", "mean_ppl_q"), ("Mean PPL(base)", "mean_ppl_base"), ("Mean PPL(Q)/PPL(base)", "ppl_ratio"),
    ("Mean ln(PPL(Q)/PPL(base))", "ln_ppl_ratio"), ("Mean KLD", "mean_kld"), ("Maximum KLD", "max_kld"),
    ("Mean delta p", "mean_delta_p"), ("RMS delta p", "rms_delta_p"), ("Same top p", "same_top_p"),
)  # fmt: skip


def show_evaluation(found: "Evaluation", checkpoint: str, source: str) -> None:
    """All tables of one evaluation."""
    OUT.print(f"{checkpoint} against {source}", style="bold")
    for note in found.distance["notes"]:
        OUT.print(f"note: {note}")
    _show_figures(found.distance["figures"])
    _show_rows("by domain", _domain_rows(found.distance))
    _show_rows("by position", [(f"{r['from']}-{r['to']}", r) for r in found.distance["positions"]])
    long = found.distance["long_context"]
    if long is not None:
        title = f"{long['num_sequences']} sequences of {long['length']} tokens"
        _show_rows(title, [("all", long["figures"]), *((f"{r['from']}-{r['to']}", r) for r in long["positions"])])
    if found.kv is not None:
        _show_kv(found.kv)
    if found.damage is not None:
        _show_worst(found.damage["worst"])


def _show_figures(figures: Mapping[str, Any]) -> None:
    table = Table(box=box.SIMPLE, show_header=False)
    for label, name in FIGURES:
        if figures[name] is not None:
            table.add_row(label, _estimate(figures[name]))
        if name == "mean_ppl_base" and figures["cor_ln_ppl"] is not None:
            table.add_row("Cor(ln(PPL(Q)), ln(PPL(base)))", f"{figures['cor_ln_ppl']:.4%}")
        if name == "max_kld":
            table.add_row("KLD percentiles", _percentiles(figures["percentile_kld"]))
        if name == "rms_delta_p" and figures["percentile_delta_p"] is not None:
            table.add_row("delta p percentiles", _percentiles(figures["percentile_delta_p"]))
    table.add_row(f"{PLUS_MINUS}", "standard error over positions (over documents)")
    table.add_row("over", f"{figures['num_positions']} positions of {figures['num_documents']} documents")
    OUT.print(table)


def _estimate(row: Mapping[str, Any]) -> str:
    """The error between brackets takes documents, not positions, as independent."""
    by_document = "" if row["document_error"] is None else f" ({row['document_error']:.6f})"
    return f"{_plain(row, 6)}{by_document}"


def _plain(row: Mapping[str, Any], digits: int) -> str:
    value = f"{row['value']:.{digits}f}"
    return value if row["error"] is None else f"{value} {PLUS_MINUS} {row['error']:.{digits}f}"


def _percentiles(rows: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}%: {row['value']:.4f}" for name, row in rows.items())


def _domain_rows(distance: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    domains = distance["domains"]
    return list(domains.items()) if len(domains) > 1 else []


def _show_rows(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("", "count", "Mean KLD", "Same top p", "RMS delta p"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, row in rows:
        cells = [_plain(row[key], 5) if row[key] else "-" for key in ("mean_kld", "same_top_p", "rms_delta_p")]
        table.add_row(name, str(row["num_positions"]), *cells)
    OUT.print(table)


def _show_kv(rows: Sequence[Mapping[str, Any]]) -> None:
    worst = max(rows, key=lambda row: row["relative_error"])
    saturated = max(rows, key=lambda row: row["saturated_share"])
    OUT.print(
        f"KV cache in FP8: largest relative error {worst['relative_error']:.4f} at layer {worst['layer']} "
        f"{worst['tensor']}; largest saturated share {saturated['saturated_share']:.2%} at layer {saturated['layer']} "
        f"{saturated['tensor']}"
    )


def _show_worst(worst: Mapping[str, Any]) -> None:
    for row in worst["layers"][:SHOWN_WORST]:
        OUT.print(f"worst layer: {row['layer']}, own error {row['own_error']:.4f}, cosine {row['own_cosine']:.6f}")
    for row in worst["routers"][:SHOWN_WORST]:
        OUT.print(f"worst router: layer {row['layer']}, {row['router_agreement']:.2%} of the source's choices")
    for row in worst["routed_experts"][:SHOWN_WORST]:
        OUT.print(
            f"most rerouted expert: layer {row['layer']} expert {row['expert']}, "
            f"{row['routing_changes']:.2%} of the tokens"
        )
    for row in worst["experts"][:SHOWN_WORST]:
        OUT.print(
            f"worst expert: layer {row['layer']} expert {row['expert']}, error {row['relative_error']:.4f} on "
            f"{row['tokens']} tokens, {row['weighted_error']:.4f} of the layer's experts"
        )


def show_gates(results: "Sequence[GateResult]") -> None:
    for result in results:
        value = "not measured" if result.value is None else f"{result.value:.6g}"
        word = "passed" if result.passed else "FAILED"
        OUT.print(f"gate {result.name} {result.limit:g} on {result.figure}: {value}, {word}")

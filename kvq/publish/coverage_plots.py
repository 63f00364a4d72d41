"""Two plots of a coverage report. The one module that imports matplotlib for them; it is an extra (`kvq[plots]`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOKENS_PLOT, ERROR_PLOT = "coverage-tokens.png", "coverage-error.png"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class PlotsLeftOutError(Exception):
    """There is nothing to draw with, or nothing to draw; the message says which."""


def draw_coverage(report: Mapping[str, Any], folder: Path) -> tuple[Path, ...]:
    """Write tokens per expert and error per layer as PNG files. Raises PlotsLeftOutError, OSError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsLeftOutError("plots were left out: matplotlib is not installed (pip install 'kvq[plots]')") from None
    if not report["layers"]:
        raise PlotsLeftOutError("plots were left out: no matrix was quantized here")
    written = []
    for name, draw in ((TOKENS_PLOT, _draw_tokens), (ERROR_PLOT, _draw_errors)):
        figure = Figure(figsize=(9, 5), layout="constrained")
        draw(figure.add_subplot(), report)
        figure.savefig(folder / name, dpi=120, metadata={"Software": None})  # the same report, the same bytes
        written.append(folder / name)
    return tuple(written)


def _draw_tokens(axes: "Axes", report: Mapping[str, Any]) -> None:
    """A line for each layer: its experts' tokens, the fewest first."""
    for row in report["layers"]:
        tokens = sorted(e["tokens"] or 0 for e in report["experts"] if e["layer"] == row["layer"])
        axes.plot(range(len(tokens)), tokens, label=f"layer {row['layer']}", linewidth=1)
    axes.axhline(report["few_tokens"], color="grey", linestyle=":", linewidth=1)
    axes.set_yscale("symlog", linthresh=1)
    axes.set(title="Calibration tokens per expert", xlabel="experts, fewest tokens first", ylabel="tokens")
    if len(report["layers"]) <= 12:
        axes.legend()


def _draw_errors(axes: "Axes", report: Mapping[str, Any]) -> None:
    """Mean and range over the experts of a layer, by projection: of outputs, or of weights without data."""
    key = "relative_output_error"
    if all(row["mean_relative_output_error"] is None for row in report["layers"]):
        key = "relative_weight_error"
    layers = [row["layer"] for row in report["layers"]]
    for projection in PROJECTIONS:
        found = [[e["matrices"][projection][key] for e in report["experts"] if e["layer"] == layer] for layer in layers]
        values = [[value for value in layer if value is not None] for layer in found]
        means = [sum(layer) / len(layer) if layer else float("nan") for layer in values]
        axes.plot(layers, means, marker=".", label=projection)
        low, high = ([function(layer, default=float("nan")) for layer in values] for function in (min, max))
        axes.fill_between(layers, low, high, alpha=0.15)
    axes.set(title=f"{key.replace('_', ' ').capitalize()} per layer: mean and range", xlabel="layer", ylabel="error")
    axes.set_ylim(bottom=0)
    axes.legend()

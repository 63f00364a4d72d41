"""Plots of the reports, as PNG files that can be read without the code. The only module that knows matplotlib."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

SIZE_INCHES = (8.0, 4.5)
DPI = 120
MARKED_EXPERTS = 3


def draw(folder: Path, distance: Mapping[str, Any], damage: Mapping[str, Any] | None, suffix: str = "") -> list[str]:
    """Draw what was measured into the folder and give the files' names. Raises ImportError without matplotlib."""
    recipe, dtype = distance["checkpoint"]["recipe"], distance["settings"]["kv_dtype"]
    parts = [distance["source"]["id"], recipe or distance["checkpoint"]["format"], f"KV cache {dtype}" if dtype else ""]
    title = ", ".join(part for part in parts if part)
    names = [_positions(folder / f"distance-positions{suffix}.png", distance, title)]
    if len(distance["domains"]) > 1:
        names.append(_domains(folder / f"distance-domains{suffix}.png", distance, title))
    if damage is not None:
        names.append(_layers(folder / f"damage-layers{suffix}.png", damage, title))
        if damage["experts"]:
            names.append(_routers(folder / f"damage-routers{suffix}.png", damage, title))
            names.append(_experts(folder / f"damage-experts{suffix}.png", damage, title))
    return names


@contextmanager
def _axes(path: Path, titles: tuple[str, str], x_label: str, y_label: str) -> Iterator[Any]:
    """A figure with one pair of axes, saved when its content is drawn; nothing of the display is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title("\n".join(titles), fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    yield axes
    figure.savefig(path, metadata={"Software": None})


def _positions(path: Path, distance: Mapping[str, Any], title: str) -> str:
    titles = ("Does the error grow with the context?", title)
    with _axes(path, titles, "tokens before the position", "mean KL (nats), with standard error") as axes:
        for label, rows in (("documents", distance["positions"]), _long_rows(distance)):
            if rows:
                names = [str(row["from"]) if row["from"] == row["to"] else f"{row['from']}-{row['to']}" for row in rows]
                values = [row["mean_kld"]["value"] for row in rows]
                errors = [row["mean_kld"]["error"] or 0.0 for row in rows]
                axes.errorbar(names, values, yerr=errors, marker="o", capsize=3, label=label)
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", labelsize=8)
        axes.legend(fontsize=8)
    return path.name


def _long_rows(distance: Mapping[str, Any]) -> tuple[str, Any]:
    long = distance["long_context"]
    return ("", None) if long is None else (f"sequences of {long['length']} tokens", long["positions"])


def _domains(path: Path, distance: Mapping[str, Any], title: str) -> str:
    names = list(distance["domains"])
    found = [distance["domains"][name]["mean_kld"] for name in names]
    with _axes(path, ("Distance by kind of text", title), "mean KL (nats), with standard error", "") as axes:
        axes.barh(names, [row["value"] for row in found], xerr=[row["error"] or 0.0 for row in found], capsize=3)
        axes.invert_yaxis()
    return path.name


def _layers(path: Path, damage: Mapping[str, Any], title: str) -> str:
    rows = damage["layers"]
    numbers = [row["layer"] for row in rows]
    with _axes(path, ("Error of each layer's output", title), "decoder layer", "relative error") as axes:
        own, come = [row["own_error"] for row in rows], [row["accumulated_error"] for row in rows]
        axes.bar(numbers, own, label="own: what the layer adds, on the source's input")
        axes.plot(numbers, come, "o-", color="tab:orange", label="accumulated: hidden states after the layer")
        cosine = [1 - row["accumulated_cosine"] for row in rows]
        axes.plot(numbers, cosine, "x--", color="tab:green", label="accumulated: 1 - cosine")
        axes.set_xticks(numbers if len(numbers) <= 20 else numbers[:: len(numbers) // 16])
        axes.legend(fontsize=8)
    return path.name


def _routers(path: Path, damage: Mapping[str, Any], title: str) -> str:
    rows = [row for row in damage["layers"] if row["router_agreement"] is not None]
    numbers = [row["layer"] for row in rows]
    label = "share of the source's choices"
    with _axes(path, ("Experts that both routers choose", title), "decoder layer", label) as axes:
        axes.plot(numbers, [row["router_agreement"] for row in rows], "o-", label="own: on the source's input")
        come = [row["router_agreement_accumulated"] for row in rows]
        axes.plot(numbers, come, "o-", label="accumulated: each model on its own input")
        axes.set_xticks(numbers if len(numbers) <= 20 else numbers[:: len(numbers) // 16])
        axes.legend(fontsize=8)
    return path.name


def _experts(path: Path, damage: Mapping[str, Any], title: str) -> str:
    from matplotlib.patches import Rectangle

    rows = damage["experts"]
    layers = sorted({row["layer"] for row in rows})
    count = 1 + max(row["expert"] for row in rows)
    error_LE = np.full((len(layers), count), np.nan)
    for row in rows:
        if row["relative_error"] is not None:
            error_LE[layers.index(row["layer"]), row["expert"]] = row["relative_error"]
    titles = ("Output error of each expert on the source's tokens; framed: largest part of a layer's error", title)
    with _axes(path, titles, "expert (white: without tokens)", "decoder layer") as axes:
        image = axes.imshow(error_LE, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
        axes.figure.colorbar(image, label="relative error")
        for row in damage["worst"]["experts"][:MARKED_EXPERTS]:
            corner = (row["expert"] - 0.5, layers.index(row["layer"]) - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=1.5))
    return path.name

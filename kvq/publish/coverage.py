"""What calibration data each expert saw and what came of it: `kvq-reports/coverage.json`, made from the manifest.

Everything in it was measured by the run that wrote the checkpoint, so that it can be made again at any time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kvq import __version__
from kvq.checkpoint.index import MANIFEST_NAME, expect_folder
from kvq.errors import CheckpointError, OutputError
from kvq.publish.coverage_plots import PlotsLeftOutError, draw_coverage
from kvq.publish.manifest import FEW_TOKENS, manifest_text, mean_of_known
from kvq.quantize.types import FALLBACKS
from kvq.verify.report_files import COVERAGE, REPORTS, write_whole
from kvq.verify.structure import load_manifest

REPORT_NAME = "coverage.json"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The report as written, its path below the folder, and the plots beside it or why there are none."""

    report: dict[str, Any]
    path: str
    plots: tuple[str, ...]
    note: str | None

    def as_dict(self) -> dict[str, Any]:
        """What was written, without the report itself."""
        return {"path": self.path, "plots": list(self.plots), "note": self.note}


def write_coverage(folder: Path) -> Coverage:
    """Write the report of a checkpoint folder, and its plots where matplotlib is installed.

    Raises CheckpointError for a folder without a manifest of kvq's, OutputError if it cannot be written.
    """
    expect_folder(folder)
    manifest = load_manifest(folder)
    if manifest is None:
        raise CheckpointError(f"{folder}: has no {MANIFEST_NAME}; only what kvq has written can be reported on.")
    report = coverage_report(manifest)
    place = folder / REPORTS / REPORT_NAME
    try:
        write_whole(place, manifest_text(report))
        plots, note = draw_coverage(report, place.parent), None
    except PlotsLeftOutError as reason:
        plots, note = (), str(reason)
    except OSError as error:
        raise OutputError(f"{place}: cannot be written ({error.strerror or error}).") from None
    names = tuple(f"{REPORTS}/{path.name}" for path in plots)
    return Coverage(report, f"{REPORTS}/{REPORT_NAME}", names, note)


def coverage_report(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A row for each expert and one for each layer. Tokens are null where no calibration data were used."""
    experts = _expert_rows(manifest["modules"])
    layers = sorted({row["layer"] for row in experts})
    return {
        "schema": COVERAGE,
        "kvq_version": __version__,
        "source": manifest.get("source"),
        "recipe": manifest.get("recipe"),
        "calibration": manifest.get("calibration"),
        "few_tokens": FEW_TOKENS,
        "layers": [_layer_row(layer, [row for row in experts if row["layer"] == layer]) for layer in layers],
        "experts": experts,
    }


def _expert_rows(modules: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Matrices of one expert joined: names end in `layers.L.mlp.experts.E.PROJECTION`."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for module in modules:
        parts = module["name"].split(".")
        layer, expert, projection = int(parts[-5]), int(parts[-2]), parts[-1]
        row = rows.setdefault(
            (layer, expert), {"layer": layer, "expert": expert, "tokens": module["num_tokens"], "matrices": {}}
        )
        row["matrices"][projection] = {
            key: module[key]
            for key in ("outcome", "blend_weight", "dampening_frac", "relative_weight_error", "relative_output_error")
        }
    return [rows[key] for key in sorted(rows)]


def _layer_row(layer: int, experts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tokens = [row["tokens"] for row in experts if row["tokens"] is not None]
    matrices = [matrix for row in experts for matrix in row["matrices"].values()]
    known = bool(tokens)
    return {
        "layer": layer,
        "experts": len(experts),
        "min_tokens": min(tokens) if known else None,
        "median_tokens": median(tokens) if known else None,
        "max_tokens": max(tokens) if known else None,
        "experts_without_tokens": sum(count == 0 for count in tokens) if known else None,
        "experts_with_few_tokens": sum(count < FEW_TOKENS for count in tokens) if known else None,
        "mean_blend_weight": mean_of_known([m["blend_weight"] for m in matrices]),
        "mean_relative_weight_error": mean_of_known([m["relative_weight_error"] for m in matrices]),
        "mean_relative_output_error": mean_of_known([m["relative_output_error"] for m in matrices]),
        "max_relative_output_error": max((m["relative_output_error"] or 0.0 for m in matrices), default=0.0) or None,
        "fallbacks": sum(m["outcome"] in FALLBACKS for m in matrices),
    }

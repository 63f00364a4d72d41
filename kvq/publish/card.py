"""`README.md` for the Hub, from the manifest and the report files alone: nothing in it is typed by hand.

The same files give the same bytes. What was not measured says so.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvq.checkpoint.index import MANIFEST_NAME, expect_folder, load_json
from kvq.checkpoint.source import is_hub_id
from kvq.errors import CheckpointError, OutputError, RecipeError, VerificationError
from kvq.publish.card_measured import distance_section, kv_section, plots, task_section, tool_call_section
from kvq.publish.card_metadata import CARD, SOURCE_CARD, front_matter, license_fields, source_metadata
from kvq.publish.card_page import render_page
from kvq.publish.card_tensors import classes_by_type, packed_text, tensor_rows, words
from kvq.publish.manifest import FEW_TOKENS
from kvq.verify.report_file import ReportFile

MARK = "<!-- kvq card -->"
MAX_SCRIPT = 8192
LARGEST_TP = 8


def build_card(folder: Path, base_model: str | None = None, notes: Sequence[str] = ()) -> str:
    """The card's text. `notes` are sentences that stand above everything else.

    Raises CheckpointError, RecipeError, VerificationError: a card is made from whole and fitting files or not at all.
    """
    manifest = _manifest(folder)
    source = manifest.text("source", "id")
    base = base_model or (source if manifest.at("source", "revision").value else None)
    if base is not None and not is_hub_id(base):
        raise RecipeError(f"--base-model {base}: expected a Hub id of the form owner/name.")
    rows = tensor_rows(manifest.value, manifest.path)
    grouped = classes_by_type(rows)
    head = front_matter(folder, base, manifest.text("source", "model_type"), grouped)
    page = render_page({
        "name": folder.absolute().name, "base": base, "notes": list(notes), "manifest": manifest.value,
        "packed": None if manifest.at("pass_through").value else packed_text(manifest.value),
        "stored": [(kind, words(classes)) for kind, classes in grouped.items()], "rows": rows,
        "licensed": bool(license_fields(folder, source_metadata(folder))),
        "source_card": (folder / SOURCE_CARD).is_file(), "calibration": _calibration(manifest),
        "distance": distance_section(folder), "tasks": task_section(folder),
        "tool_calls": tool_call_section(folder), "kv": kv_section(folder), "plots": plots(folder),
        "summary": _summary(manifest), "scripts": serving_scripts(folder), "command": serve_command(manifest),
        "recipe": _recipe_text(manifest), "few_tokens": FEW_TOKENS,
    })  # fmt: skip
    return head + page


def _manifest(folder: Path) -> ReportFile:
    """Raises CheckpointError where kvq did not make the folder."""
    expect_folder(folder)
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError(f"{folder}: has no {MANIFEST_NAME}; `kvq card` describes what `kvq quantize` has made.")
    manifest = ReportFile(path, load_json(path))
    for keys in (("kvq_version",), ("source", "format"), ("device",), ("recipe_sha256",), ("recipe", "solver")):
        manifest.text(*keys)
    for keys in (("recipe", "num_bits"), ("recipe", "group_size"), ("source", "bytes"), ("summary", "output_bytes")):
        manifest.count(*keys)
    for key in ("versions", "warnings", "files", "serving", "calibration", "pass_through"):
        manifest.at(key)
    return manifest


def _calibration(manifest: ReportFile) -> dict[str, Any] | None:
    """The data that the run saw, None for a run without."""
    if manifest.at("calibration").value is None:
        return None
    counts = ("num_sequences", "num_sequences_asked", "sequence_length", "num_tokens", "num_rows")
    texts = {key: manifest.text("calibration", key) for key in ("name", "sha256")}
    return {**texts, **{key: manifest.count("calibration", key) for key in counts}}


def _summary(manifest: ReportFile) -> dict[str, Any]:
    """Sizes, errors and coverage of the run, checked."""
    summary = manifest.at("summary")
    numbers = {
        key: summary.number(key)
        for key in ("bits_per_weight", "mean_relative_weight_error", "mean_relative_output_error")
    }
    counts = {
        key: summary.count(key)
        for key in ("source_bytes", "output_bytes", "num_quantized_modules", "num_experts",
                    "num_experts_below_64_tokens", "num_fallbacks")
    }  # fmt: skip
    worst = [
        (row.text("name"), row.number("relative_output_error"), row.count("num_tokens"))
        for row in summary.rows("worst_modules")
    ]
    few = [(name, row.count()) for name, row in summary.items("experts_with_fewest_tokens")]
    fallbacks = [(row.text("name"), row.text("outcome")) for row in summary.rows("fallbacks")]
    return {**numbers, **counts, "worst": worst, "few": few, "fallbacks": fallbacks[:10]}


def _recipe_text(manifest: ReportFile) -> str:
    """The recipe as YAML that `--recipe` reads: JSON's scalars are YAML's."""
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in manifest.at("recipe").value.items())


def serving_scripts(folder: Path) -> list[tuple[str, str]]:
    """Commands and settings that lie in `serving/`, by name. Raises VerificationError for what is not text."""
    scripts = []
    for path in sorted((folder / "serving").glob("*")):
        if path.suffix not in (".sh", ".yaml") or not path.is_file():
            continue
        try:
            scripts.append((f"serving/{path.name}", path.read_bytes()[:MAX_SCRIPT].decode("utf-8")))
        except UnicodeDecodeError:
            raise VerificationError(f"{path}: is not text; write it anew with `kvq serve-config`.") from None
    return scripts


def serve_command(manifest: ReportFile) -> str | None:
    """The command for SGLang by the manifest's flags, at the largest size that fits eight GPUs."""
    serving = manifest.at("serving")
    sizes = [row.count() for row in serving.rows("tensor_parallel_sizes")]
    fitting = [size for size in sizes if size <= LARGEST_TP]
    if serving.text("engine") != "sglang" or not fitting:
        return None
    flags = [row.text() for row in serving.rows("flags")]
    return " ".join(["python3 -m sglang.launch_server --model-path . --tp-size", str(max(fitting)), *flags])


def write_card(folder: Path, text: str) -> Path:
    """Put it in place. A README.md that kvq did not write becomes SOURCE_README.md, once. Raises OutputError."""
    path, kept = folder / CARD, folder / SOURCE_CARD
    partial = path.with_name(f".{CARD}.partial")
    try:
        if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
            if kept.exists():
                raise OutputError(f"{path} was not written by kvq, and {SOURCE_CARD} is taken; move it away first.")
            os.replace(path, kept)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error}).") from None
    return path

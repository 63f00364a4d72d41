"""`kvq evaluate`: what was lost, measured."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvq.commands.options import Device, Json, path_argument, path_option, print_json, unaliased
from kvq.errors import RecipeError


class KvDtype(StrEnum):
    """Layouts of an FP8 KV cache that can be simulated."""

    FP8_E4M3 = "fp8_e4m3"
    FP8_DS_MLA = "fp8_ds_mla"


def evaluate(
    folder: Annotated[Path, path_argument("A checkpoint: quantized, or the source itself.")],
    source: Annotated[str, typer.Option(help="What it was made from: folder, Hub id or alias.")],
    data: Annotated[
        list[Path] | None,
        path_option("Held-out JSON lines with `text`, `messages` or `input_ids`; repeatable.", "FILE"),
    ] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Rows of each file at most.")] = None,
    max_seq_length: Annotated[int, typer.Option(min=2, help="Tokens of a row at most.")] = 512,
    long_context: Annotated[int | None, typer.Option(min=2, help="Also pack all rows to sequences this long.")] = None,
    kv_dtype: Annotated[KvDtype | None, typer.Option(help="Let the checkpoint read its KV cache in FP8.")] = None,
    kv_scales: Annotated[Path | None, path_option("JSON with static KV scales; 1.0 without.")] = None,
    base_logits: Annotated[Path | None, path_option("Do not run the source: take what was kept.")] = None,
    save_base_logits: Annotated[Path | None, path_option("Keep the source's side for other candidates.")] = None,
    damage: Annotated[bool, typer.Option(help="Measure layers, routers and experts too.")] = True,
    report: Annotated[
        Path | None,
        path_option("Folder of the reports; DIR/kvq-reports without."),
    ] = None,
    max_mean_kl: Annotated[float | None, typer.Option(min=0, help="Gate: exit 10 above it.")] = None,
    min_same_top: Annotated[float | None, typer.Option(min=0, max=1, help="Gate: exit 10 below it.")] = None,
    max_ppl_ratio: Annotated[float | None, typer.Option(min=0, help="Gate: exit 10 above it.")] = None,
    min_recovery: Annotated[
        list[str] | None, typer.Option(help="Gate TASK=PERCENT on kvq-reports/tasks-*.json; repeatable.")
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure the distance between the probabilities of two checkpoints, layer by layer, and where it comes from."""
    from kvq.calibration.forward import pick_device
    from kvq.checkpoint.source import resolve_source
    from kvq.console import ERR, show_evaluation, show_gates, stages
    from kvq.console.transfer import TransferLines
    from kvq.recipes.schema import make_gates
    from kvq.verify.documents import Cut
    from kvq.verify.evaluation import Request, evaluate_checkpoint
    from kvq.verify.gates import require
    from kvq.verify.reports import judge, write_reports

    if not data:
        raise RecipeError("--data: give at least one file of held-out rows.")
    if kv_scales is not None and kv_dtype is None:
        raise RecipeError("--kv-scales: only --kv-dtype makes use of them.")
    flags = make_gates(max_mean_kl, min_same_top, max_ppl_ratio, min_recovery or [])
    chosen_device = pick_device(device)
    lines = TransferLines(quiet=as_json)
    origin = resolve_source(unaliased(source), None, lines.note, lines.checked)
    request = Request(
        folder, origin.folder, origin.name, data, Cut(max_rows, max_seq_length, long_context),
        None if kv_dtype is None else kv_dtype.value, kv_scales, base_logits, save_base_logits, damage,
    )  # fmt: skip
    with stages() as stage:
        found = evaluate_checkpoint(request, chosen_device, stage)
    gates = judge(request, found, flags)
    written = write_reports(request, found, gates, report)
    if as_json:
        print_json(written.content)
    else:
        show_evaluation(found, str(folder), str(origin.folder))
        show_gates(gates)
    for note in written.notes:
        ERR.print(f"note: {note}")
    require(gates, str(folder))

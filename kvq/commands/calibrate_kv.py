"""`kvq calibrate-kv`: scales of an FP8 KV cache, measured, and delivered only where the engine uses them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvq.commands.options import Device, Json, known_model, path_option, print_json, unaliased, user_data


def calibrate_kv(
    model: Annotated[str, typer.Argument(help="Folder, Hub id or alias: a source or a quantized checkpoint.")],
    calibration: Annotated[
        str | None, typer.Option(help="As `kvq quantize` takes it; without it the set that ships with kvq.")
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Data on which scales are compared by KL; without it by rounding error.")
    ] = None,
    target: Annotated[
        Literal["sglang", "vllm", "transformers"], typer.Option(help="Engine that the scales are for.")
    ] = "sglang",
    out: Annotated[Path | None, path_option("Folder for the files; by default MODEL's name and -kv.", "FOLDER")] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Calibration sequences at most.")] = 512,
    max_seq_length: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 2048,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Held-out rows at most.")] = None,
    device: Device = "auto",
    revision: Annotated[str | None, typer.Option(help="Hub revision; by default the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Calibrate the scales of an FP8 (e4m3) KV cache and say what each engine does with them."""
    from kvq.calibration.dataset import check_rows
    from kvq.calibration.forward import pick_device
    from kvq.checkpoint.source import resolve_source
    from kvq.console import show_kv_report, stages
    from kvq.console.transfer import TransferLines

    chosen_device = pick_device(device)
    data = user_data(calibration) if calibration is not None else None
    other_data = user_data(held_out) if held_out is not None else None
    check_rows(data)
    if other_data is not None:
        check_rows(other_data)
    lines = TransferLines(quiet=as_json)
    source = resolve_source(unaliased(model), revision, lines.note, lines.checked)
    folder = out or Path(f"{model if known_model(model) else source.name}-kv")

    from kvq.publish.kv_run import KvRequest, calibrate_kv_scales

    request = KvRequest(source, folder, target, data, other_data, num_samples, max_seq_length, max_rows)
    with stages() as stage:
        result = calibrate_kv_scales(request, chosen_device, stage)
    if as_json:
        print_json({"out": str(folder), "files": result.files, **result.report})
    else:
        show_kv_report(result.report, folder, result.files)
        typer.echo(str(folder))

"""`kvq serve-config`: how to serve a checkpoint."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvq.commands.options import Json, path_argument, path_option, print_json
from kvq.errors import RecipeError


def serve_config(
    folder: Annotated[Path, path_argument("kvq's output, or the FP8 source of a prefill role.")],
    gpu: Annotated[str, typer.Option(help="GPU that serves: h100, h200, b200, b200-192.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the server.")] = 8,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size; by default all GPUs.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Expert-parallel size; by default the least.")] = None,
    role: Annotated[Literal["single", "prefill", "decode"], typer.Option(help="Alone, or one of a pair.")] = "single",
    kv_dtype: Annotated[Literal["auto", "bf16", "fp8_e4m3"], typer.Option(help="KV cache; auto is bf16.")] = "auto",
    engine: Annotated[Literal["sglang", "vllm"], typer.Option(help="Whose command is printed.")] = "sglang",
    engine_version: Annotated[str | None, typer.Option(help="SGLang 0.5.17 to 0.5.23; by default the newest.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Longest request, prompt and answer.")] = None,
    integrity: Annotated[
        Literal["auto", "page-tags", "kv-canary", "none"], typer.Option(help="Check of the KV cache.")
    ] = "auto",
    out: Annotated[Path | None, path_option("Where to write; by default FOLDER/serving.")] = None,
    as_json: Json = False,
) -> None:
    """Write the engine's settings, correct by construction, into the checkpoint's `serving/`, and print the command."""
    from kvq.publish.serve import ServeRequest, make_serving
    from kvq.publish.served import served_from_folder
    from kvq.publish.serving_files import SERVING_FOLDER, write_texts

    if engine == "vllm" and role != "single":
        raise RecipeError("--engine vllm: kvq writes pairs of prefill and decode for SGLang only.")
    request = ServeRequest(
        gpu=gpu, gpus=gpus, tp=tp, ep=ep, roles=(role,), kv_dtype=kv_dtype, version=engine_version, context=context,
        integrity=integrity, model_path=str(folder.resolve()) if out else ".",
    )  # fmt: skip
    serving = make_serving(served_from_folder(folder), request)
    target = out or folder / SERVING_FOLDER
    write_texts(target, serving.texts)
    if as_json:
        print_json({"out": str(target), "engine": engine, **serving.as_dict()})
        return
    from kvq.console import show_serving

    show_serving(serving.as_dict(), serving.texts, str(target), engine)

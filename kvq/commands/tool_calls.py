"""`kvq tool-calls`: whether the quantized model calls tools as its source does."""

from pathlib import Path
from typing import Annotated

import typer

from kvq.commands.options import Device, Json, path_argument, path_option, print_json


def tool_calls(
    folder: Annotated[Path, path_argument("A quantized checkpoint.")],
    data: Annotated[Path, path_option("JSON lines with `tools` and `user` or `messages`, and `call` if known.")],
    source: Annotated[Path | None, path_option("The checkpoint it was made from, run in this process.")] = None,
    server: Annotated[str | None, typer.Option(help="Address of a server that has FOLDER.")] = None,
    source_server: Annotated[str | None, typer.Option(help="Address of a server that has the source.")] = None,
    save_answers: Annotated[Path | None, path_option("Ask FOLDER alone; write its answers there.")] = None,
    source_answers: Annotated[Path | None, path_option("The source's answers, from --save-answers.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows at most.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 16384,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests to a server at a time.")] = 16,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare tool calls with the source's: whether to call, schema validity, exact match. Writes toolcalls.json.

    In this process the model's own text is parsed; a server is asked by its chat API, without and with streaming.
    """
    from kvq.console import show_tool_calls, stages
    from kvq.verify.models import check_same_prompts, one_source
    from kvq.verify.questions import load_questions
    from kvq.verify.report_files import TOOL_CALLS, report_folder, write_json, write_report
    from kvq.verify.toolcalls import run

    one_source(source, source_server, source_answers, save_answers)
    file = load_questions(data, limit)
    if source is not None:
        check_same_prompts(folder, source)
    theirs = run.read_outcomes(source_answers, file, max_tokens) if source_answers else None
    with stages() as stage:
        if source is not None or source_server is not None:
            place = source or folder
            theirs = run.ask_model(file, place, source_server, device, concurrency, max_tokens, stage)
        ours = run.ask_model(file, folder, server, device, concurrency, max_tokens, stage)
    if save_answers is not None:
        write_json(save_answers, run.outcomes_document(folder.absolute().name, file, max_tokens, ours))
        typer.echo(str(save_answers))
        return
    assert theirs is not None, "one_source has seen to it"
    report = run.compare_models(file, theirs, ours, max_tokens)
    write_report(report_folder(folder), "toolcalls", TOOL_CALLS, folder, report)
    if as_json:
        print_json(report)
    else:
        show_tool_calls(report)

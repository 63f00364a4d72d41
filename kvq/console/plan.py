"""Tables of `kvq plan` and `kvq inspect`, made from their reports alone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvq.console.screen import OUT, clock, short_size, size

ORIGINS = {
    "folder": "headers of the folder's shards",
    "facts": "facts shipped with kvq, no file was read",
    "hub": "headers read from the Hub by range requests",
}


WIDTH = 150  # where there is no terminal to ask


def _print(table: Table) -> None:
    if not OUT.is_terminal:
        OUT.width = max(OUT.width, WIDTH)
    OUT.print(table)


def _table(columns: str, title: str | None = None) -> Table:
    """Columns by name, `>` before one that is set flush right."""
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for column in columns.split("|"):
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    return table


def show_plan_report(report: Mapping[str, Any]) -> None:
    """The whole plan: classes, totals, serving, cost of the run, warnings."""
    revision = f" at {report['revision']}" if report["revision"] else ""
    OUT.print(f"{report['model']}{revision}: {report['title']}, {report['source_format']}", style="bold")
    OUT.print(f"from {ORIGINS[report['origin']]}; recipe {report['recipe']['name']} {report['recipe_sha256'][:12]}")
    _show_classes(report)
    _show_totals(report)
    _show_serving(report["serving"])
    _show_combinations(report["serving"])
    _show_run(report["run"])
    if report["ranks"]:
        show_ranks(report["ranks"], OUT)
    for warning in report["warnings"]:
        OUT.print(f"note: {warning}")
    for source in report["sources"]:
        OUT.print(f"source: {source}")


def _dtypes(totals: Mapping[str, int]) -> str:
    return ", ".join(f"{dtype} {short_size(nbytes)}" for dtype, nbytes in totals.items())


def _show_classes(report: Mapping[str, Any]) -> None:
    table = _table("class|>tensors|>parameters|stored as|>bytes|becomes|>bytes|reason")
    for row in report["classes"]:
        becomes = row["planned"] if row["planned"] == "kept" else f"{row['planned']}: {' '.join(row['output_dtypes'])}"
        table.add_row(
            row["class"], f"{row['tensors']:,}", f"{row['parameters'] / 1e9:.3f} B", " ".join(row["source_dtypes"]),
            short_size(row["source_bytes"]), becomes, short_size(row["output_bytes"]), row["reason"],
        )  # fmt: skip
    _print(table)


def _show_totals(report: Mapping[str, Any]) -> None:
    source, output = report["source"], report["output"]
    OUT.print(
        f"before: {source['tensors']:,} tensors, {source['parameters'] / 1e9:.2f} B parameters, "
        f"{source['tensor_bytes']:,} bytes = {size(source['tensor_bytes'])}"
    )
    each = output["bits_per_weight"]
    OUT.print(
        f"after:  {output['tensors']:,} tensors, {output['tensor_bytes']:,} bytes = {size(output['tensor_bytes'])}, "
        f"{each['all']} bits a weight, {each['routed_experts']} in the experts"
    )
    if output["file_bytes"] is None:
        OUT.print("files:  copied as they are; facts do not say how the source is cut into files")
    else:
        OUT.print(
            f"files:  {output['shards']} shards, {output['file_bytes']:,} bytes with their headers; the largest "
            f"{size(output['largest_shard_bytes'])}"
        )
    mtp = sum(row["mtp_bytes"] for row in report["classes"])
    if mtp:
        OUT.print(f"of which the multi-token-prediction layer: {size(mtp)}")


def _show_serving(serving: Mapping[str, Any]) -> None:
    OUT.print(
        f"\n{serving['gpus']} x {serving['gpu_title']} {serving['gpu_bytes'] / 1e9:.0f} GB, TP {serving['tp']} "
        f"EP {serving['ep']} DP {serving['dp']}, {serving['replicas']} copies; "
        f"{serving['reserved_share']:.0%} of each GPU left to the runtime; arithmetic, not measured"
    )
    for problem in serving["problems"]:
        OUT.print(f"cannot be served so: {problem}", style="bold")
    table = _table(
        "|>weights a GPU|>room for KV|KV cache|>bytes a token|>tokens|>requests of " + f"{serving['context']:,}"
    )
    for side in ("before", "after"):
        values = serving[side]
        room = size(values["pool_per_gpu"]) if values["fits"] else "does not fit"
        for number, fit in enumerate(values["kv"]):
            first = (side, size(values["weights_per_gpu"]), room) if number == 0 else ("", "", "")
            table.add_row(
                *first, f"{fit['dtype']}: {fit['layout']}", f"{fit['bytes_per_token']:,}", f"{fit['tokens']:,}",
                f"{fit['requests']:,}",
            )  # fmt: skip
    _print(table)
    if serving["after"]["mtp_per_gpu"]:
        OUT.print(
            f"of the weights on each GPU, MTP (speculative decoding only): {size(serving['after']['mtp_per_gpu'])}"
        )
    OUT.print(f"{serving['notes']['engine']} flags: {' '.join(serving['notes']['flags']) or 'none'}")


def _show_combinations(serving: Mapping[str, Any]) -> None:
    table = _table("group size|TP x EP that fit|TP x EP that do not, and why")
    groups = sorted({row["group_size"] for row in serving["combinations"]})
    for group in groups:
        rows = [row for row in serving["combinations"] if row["group_size"] == group]
        fitting = " ".join(f"{row['tp']}x{row['ep']}" for row in rows if row["valid"])
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if not row["valid"]:
                reasons.setdefault(row["problems"][0], []).append(f"{row['tp']}x{row['ep']}")
        lines = [f"{' '.join(sizes)}: {reason}" for reason, sizes in reasons.items()]
        table.add_row(str(group), fitting or "none", "\n".join(lines))
    _print(table)


def show_ranks(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Who does what of a run with several ranks."""
    table = _table(">rank|experts of each layer|>sequences|>shards|>bytes to write")
    for row in rows:
        last = row["first_expert"] + row["num_experts"] - 1
        table.add_row(
            str(row["rank"]), f"{row['first_expert']} to {last}", str(row["num_sequences"]), str(row["shards"]),
            short_size(row["tensor_bytes"]),
        )  # fmt: skip
    console.print(table)


def _show_run(run: Mapping[str, Any]) -> None:
    OUT.print(f"the run, on {run['device']}; memory is an estimate", style="bold")
    table = Table(box=box.SIMPLE, show_header=False)
    source = f", {size(run['disk_source_bytes'])} of it the download" if run["disk_source_bytes"] else ""
    table.add_row("disk", f"{size(run['disk_bytes'])}{source}")
    ranks = run["num_ranks"]
    each = f" for {ranks} ranks on one host, {size(run['host_bytes_per_rank'])} each" if ranks > 1 else ""
    table.add_row("host memory", f"{size(run['host_bytes'])}{each}")
    if run["device_bytes"] is not None:
        table.add_row("GPU memory", f"{size(run['device_bytes'])}{' on each GPU' if ranks > 1 else ''}")
    for term in run["memory_terms"]:
        table.add_row("", f"{term['phase']}, {term['where']}: {term['what']}, {size(term['nbytes'])}")
    time = run["time"]
    table.add_row("time", f"{clock(time['seconds'])}, {time['note']}" if time["seconds"] is not None else time["note"])
    if time["profile"]:
        table.add_row("", f"profile {time['profile']}")
    calibration = run["calibration"]
    if calibration is not None:
        table.add_row(
            "calibration", f"{calibration['tokens']:,} tokens asked for, {calibration['mean_tokens_per_expert']:,} an "
            "expert if the router spread them evenly",
        )  # fmt: skip
        if calibration["warning"]:
            table.add_row("", calibration["warning"])
    _print(table)


def show_comparison(rows: Sequence[Mapping[str, Any]]) -> None:
    """Recipes side by side: a column each."""
    table = _table("|" + "|".join(f">{row['recipe']}" for row in rows), "compared")
    lines: Iterable[tuple[str, Any]] = (
        ("experts", lambda row: f"g{row['group_size']} {row['solver']}"),
        ("rest", lambda row: row["rest"]),
        ("tensors", lambda row: size(row["tensor_bytes"])),
        ("files, bytes", lambda row: "as the source" if row["file_bytes"] is None else f"{row['file_bytes']:,}"),
        ("bits a weight", lambda row: str(row["bits_per_weight"]["all"])),
        ("in the experts", lambda row: str(row["bits_per_weight"]["routed_experts"])),
        ("weights a GPU", lambda row: size(row["weights_per_gpu"])),
        ("TP without EP", lambda row: " ".join(map(str, row["tensor_parallel_sizes"])) or "none"),
        ("host memory", lambda row: size(row["host_bytes"])),
        ("GPU memory", lambda row: "none" if row["device_bytes"] is None else size(row["device_bytes"])),
    )
    for title, cell in lines:
        table.add_row(title, *map(cell, rows))
    for number, fit in enumerate(rows[0]["kv"]):
        table.add_row(f"tokens, {fit['dtype']} {fit['layout']}", *(f"{row['kv'][number]['tokens']:,}" for row in rows))
    _print(table)
    for row in rows:
        for problem in row["problems"]:
            OUT.print(f"{row['recipe']} cannot be served so: {problem}")


def show_inspection(report: Mapping[str, Any]) -> None:
    """What a checkpoint is."""
    OUT.print(f"{report['folder']}: {report['title']}, {report['format']}", style="bold")
    table = _table("class|>tensors|>parameters|stored as|>bytes")
    for row in report["classes"]:
        table.add_row(
            row["class"], f"{row['tensors']:,}", f"{row['parameters'] / 1e9:.3f} B", _dtypes(row["dtypes"]),
            short_size(row["bytes"]),
        )  # fmt: skip
    _print(table)
    OUT.print(f"{report['tensors']:,} tensors in {report['shards']} shards, {size(report['bytes'])}")
    for title, text in report["findings"].items():
        OUT.print(f"{title}: {text}")
    for problem in report["problems"]:
        OUT.print(f"note: {problem}")

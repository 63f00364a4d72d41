"""Tasks and tool calls of FP8 sources and their INT4 outputs, each behind a real SGLang server.

    python benchmarks/sglang/serve_tasks.py --data DATA SOURCE=OUTPUT [SOURCE=OUTPUT ...] [--rows 100] [--out ./out]

DATA holds eval-toolcalls.jsonl and eval-arithmetic.jsonl (or the names that --files gives). One server at a time: the
source's answers are saved, then compared with the output's. `kvq tasks` asks /v1/completions with token prompts;
`kvq tool-calls` asks /v1/chat/completions with `tools`, without and with streaming, and the server parses the calls.
Reports land in OUTPUT/kvq-reports and in --out. Engine settings are those of compare_served.py.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from compare_served import COMMON, DENSE, ENVIRONMENT, SPARSE
from engine import PORT, ServerDiedError, kvq, serving
from pad_indexer import pad_indexer

TOOL_PARSERS = {"glm4_moe": "glm45", "glm_moe_dsa": "glm45", "kimi_k2": "kimi_k2"}
MAX_TOKENS = 200


def ask(folder: Path, data: Sequence[Path], log: Path, extra: Mapping[str, Sequence[object]]) -> list[int]:
    """Serve one checkpoint and ask it everything; exit codes of kvq. `extra` has each command's own arguments."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sparse = "index_topk" in config
    padded = pad_indexer(folder, log.with_suffix(".padded")) if sparse else folder
    settings = {
        **COMMON, **(SPARSE if sparse else DENSE), "model-path": str(padded), "served-model-name": folder.name,
        "tool-call-parser": TOOL_PARSERS[config["model_type"]],
    }  # fmt: skip
    try:
        with serving(settings, log, ENVIRONMENT) as seconds:
            sys.stdout.write(f"{folder.name}: engine up after {seconds:.0f} s\n")
            sys.stdout.flush()
            common = ["--server", f"http://127.0.0.1:{PORT}", "--max-tokens", MAX_TOKENS]
            tasks = [word for path in data for word in ("--task", path)]
            return [
                kvq("tasks", folder, *tasks, *common, *extra["tasks"]),
                kvq("tool-calls", folder, "--data", data[0], *common, *extra["tool-calls"]),
            ]
    except ServerDiedError as error:
        sys.stdout.write(f"{folder.name}: {error}\n")
        return [-1]
    finally:
        if padded != folder:
            shutil.rmtree(padded)


def compare(source: Path, output: Path, data: Sequence[Path], rows: int, out: Path) -> list[int]:
    """Source first, then the output against the source's saved answers."""
    saved = {command: out / f"{source.name}.{command}.json" for command in ("tasks", "tool-calls")}
    limit = ["--limit", rows]
    keep = {command: [*limit, "--save-answers", path] for command, path in saved.items()}
    against = {command: [*limit, "--source-answers", path] for command, path in saved.items()}
    codes = ask(source, data, out / f"{source.name}.log", keep)
    if any(codes):
        return codes
    codes = ask(output, data, out / f"{output.name}.log", against)
    shutil.copytree(output / "kvq-reports", out / output.name, dirs_exist_ok=True)
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", metavar="SOURCE=OUTPUT")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--files", nargs="+", default=["eval-toolcalls.jsonl", "eval-arithmetic.jsonl"])
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "./out")))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    data = [arguments.data / name for name in arguments.files]
    failed = False
    for pair in arguments.pairs:
        source, output = map(Path, pair.split("="))
        codes = compare(source, output, data, arguments.rows, arguments.out)
        sys.stdout.write(f"{pair}: exit codes {codes}\n")
        failed = failed or any(codes)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Serve FP8 sources and their INT4 outputs with SGLang, the same way, and compare what they say.

    python benchmarks/sglang/compare_served.py --data DATA SOURCE=OUTPUT [SOURCE=OUTPUT ...] [--with-config]
        [--rows 50] [--out ./out] [--dry-run]

DATA holds eval-toolcalls.jsonl (tools, user, call), eval-arithmetic.jsonl (q, cot, ans) and eval-text.jsonl (text).
Exact answers under greedy decoding with the checkpoint's chat template; log-probabilities of each prompt token. Where
OUTPUT has `kvq-reports/distance.json`, its mean KL is put beside the difference of the log-probabilities. A server
that does not start is reported, and the next one is tried.

With --with-config each output is served by its own YAML, its draft layer included, which `kvq serve-config OUTPUT --gpu
h200 --gpus 1 --engine-version` (the installed SGLang's) writes into --out first. Settings below that stand for what the
YAML says itself are then left away; of the others those win that the reduced machine asks for, and `overridden` in the
results names them. So one command serves all three families:

    python benchmarks/sglang/compare_served.py --data DATA --with-config GLM5=GLM5-INT4 GLM47=GLM47-INT4 K2=K2-INT4

--dry-run writes the YAMLs and prints each server's command; it needs no GPU.

The kernels left out by bundle.py are stepped around: Triton attention (MLA, GQA); for DSA sparse FlashMLA for prefill
and decode, and no dense prefill of short prompts, which would ask for FlashAttention 3. DSA's indexer is padded to 32
heads of zero weight, as DeepGEMM has no decode kernel for fewer on Hopper; prompts shorter than index_topk attend to
all anyway.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine import PORT, ServerDiedError, ask_all, kvq, server_command, serving
from pad_indexer import pad_indexer

COMMON = {
    "sampling-backend": "pytorch", "grammar-backend": "none", "disable-shared-experts-fusion": True,
    "moe-runner-backend": "triton", "mem-fraction-static": 0.3, "max-running-requests": 64, "max-total-tokens": 65536,
    "context-length": 2048, "disable-cuda-graph": True, "disable-overlap-schedule": True, "disable-radix-cache": True,
    "log-level": "warning", "tp-size": 1,
}  # fmt: skip
DENSE = {"attention-backend": "triton"}
SPARSE = {
    "attention-backend": "dsa", "dsa-prefill-backend": "flashmla_sparse", "dsa-decode-backend": "flashmla_sparse",
    "kv-cache-dtype": "bfloat16", "page-size": 64,
}  # fmt: skip
# 0.5.17 arg_groups: a threshold that is set is kept; at 0 no prompt is short enough for the dense path (FA3 only).
# What kvq's YAML must say by itself.
OF_THE_CONFIG = ("disable-shared-experts-fusion", "tp-size", "page-size")
ENVIRONMENT = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0", "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}
MAX_NEW_TOKENS, PROMPT_CHARACTERS, PROMPTS = 96, 1200, 16


def rows(path: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]


def load_template(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template)


def prompt_and_answer(tokenizer: Any, row: Mapping[str, Any]) -> tuple[str, str]:
    """What the model reads, and what it should say until its turn ends."""
    user = [{"role": "user", "content": row.get("user", row.get("q"))}]
    if "call" in row:
        function = {"name": row["call"]["name"], "arguments": row["call"]["arguments"]}
        call = {"id": f"functions.{function['name']}:0", "type": "function", "function": function}
        reply: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    else:
        reply = {"role": "assistant", "content": f"{row['cot']} #### {row['ans']}"}
    render = tokenizer.apply_chat_template
    prompt = render(user, tools=row.get("tools"), tokenize=False, add_generation_prompt=True)
    return prompt, render([*user, reply], tools=row.get("tools"), tokenize=False).removeprefix(prompt)


def exact(folder: Path, tokenizer: Any, cases: list[dict[str, Any]], port: int) -> tuple[list[bool], list[str]]:
    """Which answers are the expected text, and the texts."""
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    eos = generation["eos_token_id"]
    stop = [tokenizer.decode([token]) for token in (eos if isinstance(eos, list) else [eos])]
    sampling = {
        "temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "skip_special_tokens": False, "stop": stop,
    }  # fmt: skip
    pairs = [prompt_and_answer(tokenizer, case) for case in cases]
    answers = ask_all([{"text": prompt, "sampling_params": sampling} for prompt, _ in pairs], 16, port)
    right, said = [], []
    for (_, answer), (_, expected) in zip(answers, pairs, strict=True):
        for end in stop:
            expected = expected.split(end)[0]
        said.append(answer["text"])
        right.append(answer["text"].strip() == expected.strip())
    return right, said


def prompt_logprobs(data: Path, port: int) -> list[float]:
    """Natural log-probability of each prompt token but the first."""
    sampling = {"temperature": 0, "max_new_tokens": 1}
    bodies = [
        {"text": row["text"][:PROMPT_CHARACTERS], "sampling_params": sampling, "return_logprob": True,
         "logprob_start_len": 0}
        for row in rows(data / "eval-text.jsonl", PROMPTS)
    ]  # fmt: skip
    answers = ask_all(bodies, 4, port)
    return [
        token[0]
        for _, answer in answers
        for token in answer["meta_info"]["input_token_logprobs"]
        if token[0] is not None
    ]


def write_config(folder: Path, out: Path, version: str | None) -> Path:
    """The output's own YAML. Ends the program where kvq refuses: nothing could be compared."""
    target = out / f"{folder.name}.serving"
    words = ["--gpu", "h200", "--gpus", 1, "--integrity", "none", "--out", target]
    if kvq("serve-config", folder, *words, *(["--engine-version", version] if version else [])):
        sys.exit(f"{folder}: kvq serve-config refused; see above")
    return target / "sglang-single.yaml"


def settings_of(folder: Path, served: Path, config: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Settings on the command line, and those of the YAML that they override."""
    sparse = "index_topk" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = {**COMMON, **(SPARSE if sparse else DENSE), "model-path": str(served)}
    if config is None:
        return settings, []
    settings = {key: value for key, value in settings.items() if key not in OF_THE_CONFIG}
    lines = config.read_text(encoding="utf-8").splitlines()
    said = dict(line.split(": ", 1) for line in lines if not line.startswith("#"))
    other = [key for key, value in settings.items() if key in said and json.loads(said[key]) != value]
    return settings, other


def measure(arguments: argparse.Namespace, folder: Path, config: Path | None) -> dict[str, Any]:
    """Everything about one checkpoint; what failed is in `error`."""
    data, port, log = arguments.data, arguments.port, arguments.out / f"{folder.name}.log"
    sparse = "index_topk" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    served = pad_indexer(folder, log.with_suffix(".padded")) if sparse else folder
    started = time.monotonic()
    settings, overridden = settings_of(folder, served, config)
    result: dict[str, Any] = {
        "checkpoint": folder.name, "error": None, "config": str(config) if config else None, "overridden": overridden,
    }  # fmt: skip
    try:
        with serving(settings, log, ENVIRONMENT, config=config, port=port) as seconds:
            result["engine_up_s"] = round(seconds, 1)
            tokenizer = load_template(folder)
            for name in ("toolcalls", "arithmetic"):
                right, said = exact(folder, tokenizer, rows(data / f"eval-{name}.jsonl", arguments.rows), port)
                result[name], result[f"{name}_texts"] = sum(right), said
            logprobs = prompt_logprobs(data, port)
            result["logprobs"] = logprobs
            result["perplexity"] = round(math.exp(-sum(logprobs) / len(logprobs)), 4)
    except (ServerDiedError, OSError, KeyError, ValueError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    if served != folder:
        shutil.rmtree(served)
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def distance(source: Mapping[str, Any], output: Mapping[str, Any], report: Path) -> dict[str, Any]:
    """How far the two are apart on the prompts, with the range that the measured KL predicts.

    If the texts were drawn from the source model, the mean difference of log-probabilities would be the mean KL, with a
    standard error of the differences' own spread over the square root of their number; `expected` is 3 of those each
    way.
    """
    pairs = list(zip(source.get("logprobs", []), output.get("logprobs", []), strict=True))
    differences = [a - b for a, b in pairs]
    if not differences:
        return {}
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    found = {"mean_logprob_difference": mean, "standard_error": error, "tokens": len(differences)}
    if report.exists():
        kl = _find_kl(json.loads(report.read_text(encoding="utf-8")))
        if kl is not None:
            found |= {
                "mean_kl": kl,
                "expected": [kl - 3 * error, kl + 3 * error],
                "inside": abs(mean - kl) <= 3 * error,
            }
    return found


def _find_kl(report: Mapping[str, Any]) -> float | None:
    value = report.get("figures", {}).get("mean_kld", {}).get("value")
    return float(value) if isinstance(value, int | float) else None


def table(results: list[dict[str, Any]], count: int) -> str:
    lines = [
        "| checkpoint | engine up s | tool calls | arithmetic | prompt perplexity | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in results:
        cells = [row["checkpoint"], row.get("engine_up_s", "-")]
        cells += [f"{row[name]}/{count}" if name in row else "-" for name in ("toolcalls", "arithmetic")]
        cells += [row.get("perplexity", "-"), (row["error"] or "")[:60].replace("\n", " ")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", metavar="SOURCE=OUTPUT")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--with-config", action="store_true", help="serve each output by its own YAML")
    parser.add_argument("--engine-version", help="of the YAMLs; by default the installed SGLang's")
    parser.add_argument("--dry-run", action="store_true", help="write the YAMLs, print the commands, serve nothing")
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--port", type=int, default=PORT, help="side by side: 2,000 apart")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "./out")))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    version = arguments.engine_version or _installed()
    outputs = [Path(pair.split("=")[1]) for pair in arguments.pairs] if arguments.with_config else []
    configs = {folder: write_config(folder, arguments.out, version) for folder in outputs}
    if arguments.dry_run:
        for folder in (Path(name) for pair in arguments.pairs for name in pair.split("=")):
            settings, overridden = settings_of(folder, folder, configs.get(folder))
            _say(f"{shlex.join(server_command(settings, configs.get(folder)))}\noverridden: {overridden}")
        return
    results, distances = [], {}
    for pair in arguments.pairs:
        both = []
        for folder in map(Path, pair.split("=")):
            both.append(measure(arguments, folder, configs.get(folder)))
            results.append(both[-1])
            _say(table(both[-1:], arguments.rows).splitlines()[-1])
        report = Path(pair.split("=")[1]) / "kvq-reports" / "distance.json"
        try:
            distances[pair] = distance(*both, report)
        except ValueError as error:  # the two were given different numbers of tokens
            distances[pair] = {"error": str(error)}
        written = {"results": results, "distances": distances}
        (arguments.out / "compare_served.json").write_text(json.dumps(written), encoding="utf-8")
    _say("\n" + table(results, arguments.rows))
    for pair, found in distances.items():
        _say(f"{pair}: {json.dumps(found)}")


def _installed() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""KV page tags on a real SGLang 0.5.17: false alarms, faults, cost. One table each; see docs/integrity.md.

    python benchmarks/sglang/page_tags.py alarms MODEL [--requests 10000] [--once]
    python benchmarks/sglang/page_tags.py faults MODEL [--requests 3000] [--once] [--rate 0.02]
                                                       [--kinds free+swap+double]
    python benchmarks/sglang/page_tags.py cost MODEL [--at-once 1 4 8 32 64] [--pairs 5]
    all: [--out DIR] [--resume DIR] [--page-size 1] [--set flag=value ...]

MODEL is a folder that SGLang serves; for `cost` a model that is bound by memory bandwidth, such as synthetic.py writes.
Prompts are random token ids, greedy decoding, CUDA graphs, overlap schedule and radix cache on. Each command needs less
than 9 minutes; what it measured is in DIR/page-tags-<command>.json after each part, and --resume takes up the parts
that another run finished. The server's log lies beside it. Needs SGLang on PYTHONPATH, and of kvq only its code.

alarms   one load with shared prefixes, chunked prefill, retraction under memory pressure and aborts by clients, twice
         without the plugin and once with it. The first two say how far SGLang itself gives the same tokens twice.
faults   the same load twice without and once with faults at random times. Which requests a fault touches is in the
         server's log. --once: no second run without the plugin, or without faults.
cost     two servers at once, one without and one with the plugin; rounds alternate between them, after one of each
         number of requests that is not counted. Time for them: --budget-s, once all is warm.
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from engine import ServerDiedError
from page_tags_client import Load, answer_all, get_json, mixed_load, steady_load
from page_tags_server import serving_tagged

PORT = 30211
APART = 2000  # a server takes ports of its own up to 1,000 above its first
COMMON: dict[str, Any] = {
    "skip-tokenizer-init": True, "attention-backend": "triton", "sampling-backend": "pytorch",
    "grammar-backend": "none", "disable-shared-experts-fusion": True, "moe-runner-backend": "triton",
    "context-length": 2048, "max-running-requests": 64, "disable-prefill-cuda-graph": True, "log-level": "warning",
    "tp-size": 1, "enable-metrics": True,
}  # fmt: skip
# Few tokens of KV for 64 requests, and a scheduler that hopes for the best: so requests are retracted.
PRESSURE: dict[str, Any] = {
    "mem-fraction-static": 0.3, "max-total-tokens": 14336, "chunked-prefill-size": 512,
    "schedule-conservativeness": 0.1, "cuda-graph-bs-decode": [1, 8, 16, 32, 48, 64],
}  # fmt: skip
STEADY: dict[str, Any] = {
    "mem-fraction-static": 0.42, "max-total-tokens": 120_000, "chunked-prefill-size": 8192,
    "cuda-graph-bs-decode": [1, 4, 8, 32, 64],
}  # fmt: skip
TAGS = {"KVQ_KV_TAGS": "abort"}
VIOLATION = re.compile(r"KV page tag mismatch: .* for request \S+ (\{.*\})")
FAULT = re.compile(r"KV page fault injected (\{.*\})")


class Results:
    """Parts by name; written after each."""

    def __init__(self, out: Path, command: str, resume: Path | None) -> None:
        self.path = out / f"page-tags-{command}.json"
        earlier = resume / self.path.name if resume else self.path
        self.parts: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {}

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def __setitem__(self, name: str, value: Any) -> None:
        self.parts[name] = value
        self.path.write_text(json.dumps(self.parts), encoding="utf-8")

    def __getitem__(self, name: str) -> Any:
        return self.parts[name]


@contextmanager
def server(
    arguments: argparse.Namespace, settings: dict[str, Any], log: str, tags: dict[str, str], offset: int = 0
) -> Iterator[int]:
    """A server with these settings and this environment; its port."""
    port = arguments.port + offset + len(log)
    own = {"model-path": str(arguments.model), "page-size": arguments.page_size, **settings, **arguments.settings}
    started = time.monotonic()
    with serving_tagged({**COMMON, **own}, arguments.out / f"{log}.log", tags, port):
        say(f"{log}: server up in {time.monotonic() - started:.0f} s")
        yield port


def run_load(arguments: argparse.Namespace, results: Results, name: str, load: Load, tags: dict[str, str]) -> None:
    """One server, one load; keeps what each request was answered, and what the server says of itself afterwards."""
    if name in results:
        return
    with server(arguments, PRESSURE, name, tags) as port:
        started = time.monotonic()
        answers = answer_all(port, load, at_once=64)
        seconds = time.monotonic() - started
        alive = answer_all(port, steady_load(3, 1, 4), at_once=1)[0].status == 200
        state = get_json(port, "/server_info").get("internal_states", [{}])[0]
        metrics = "" if not tags else get_json(port, "/metrics/", raw=True)
    log = (arguments.out / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    results[name] = {
        "seconds": seconds, "alive": alive, "health": state.get("kvq_kv_tags"), "retractions": log.count("Retract"),
        "metrics": [line for line in metrics.splitlines() if line.startswith("kvq:kv_tag")],
        "answers": [answer.as_json() for answer in answers],
        "violations": [json.loads(found) for found in VIOLATION.findall(log)],
        "faults": [json.loads(found) for found in FAULT.findall(log)],
    }  # fmt: skip
    say(f"{name}: {len(answers)} requests in {seconds:.0f} s, {results[name]['retractions']} retractions")


def compare(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[int, int]:
    """Requests that both runs answered in full, and how many of them with other tokens."""
    both = [(a["tokens"], b["tokens"]) for a, b in zip(one, other, strict=True) if a["full"] and b["full"]]
    return len(both), sum(a != b for a, b in both)


def alarms(arguments: argparse.Namespace, results: Results) -> str:
    load = mixed_load(1, arguments.requests)
    off, on = {}, {**TAGS, "KVQ_KV_TAGS_SWEEP_SECONDS": "5"}
    again = () if arguments.once else (("without-again", off),)
    for name, tags in (("without", off), *again, ("with", on)):
        run_load(arguments, results, name, load, tags)
    lines = [
        "| run | requests | cut by clients | retractions | violations | errors | other tokens than in the first run |",
        "|---|---|---|---|---|---|---|",
    ]
    base = results["without"]["answers"]
    for name in ("without", *(name for name, _ in again), "with"):
        part = results[name]
        both, other = compare(base, part["answers"])
        found = part["health"]["violations"] if part["health"] else "-"
        cut = sum(answer["cut"] for answer in part["answers"])
        errors = sum(answer["status"] != 200 for answer in part["answers"])
        lines.append(
            f"| {name} | {len(part['answers'])} | {cut} | {part['retractions']} | {found} | {errors} | {other}/{both} |"
        )
    return "\n".join([*lines, f"health: {results['with']['health']}", *results["with"]["metrics"]])


def faults(arguments: argparse.Namespace, results: Results) -> str:
    load = mixed_load(2, arguments.requests)
    tags = {**TAGS, "KVQ_KV_TAGS_SWEEP_SECONDS": "1"}
    injected = {**tags, "KVQ_KV_TAGS_FAULTS": f"rate={arguments.rate},seed=5,kinds={arguments.kinds}"}
    again = () if arguments.once else (("sound-again", tags),)
    for name, environment in (("sound", tags), *again, ("faulty", injected)):
        run_load(arguments, results, name, load, environment)
    return fault_table(results)


def fault_table(results: Results) -> str:
    """By kind: requests that referred to the page; of these, ended by the plugin, or finished before they read it."""
    part, base = results["faulty"], results["sound"]["answers"]
    answers = {answer["rid"]: answer for answer in part["answers"]}
    sound = {answer["rid"]: answer for answer in base}
    ended = {found["rid"] for found in part["violations"]}
    lines = ["| fault | injected | requests that referred to the page | ended | finished, tokens as without faults "
             "| finished, other tokens |", "|---|---|---|---|---|---|"]  # fmt: skip
    touched: set[str] = set()
    for kind in ("free", "swap", "double"):
        of_kind = [fault for fault in part["faults"] if fault["kind"] == kind]
        if kind == "double":  # whoever was given the page afterwards
            pages = {fault["page"] for fault in of_kind}
            rids = {found["rid"] for found in part["violations"] if found["page"] in pages} - touched
        else:
            rids = {rid for fault in of_kind for rid in fault["affected"] if rid in answers}
        touched |= rids
        done = [rid for rid in rids - ended if answers[rid]["full"] and sound[rid]["full"]]
        other = [rid for rid in done if answers[rid]["tokens"] != sound[rid]["tokens"]]
        lines.append(
            f"| {kind} | {len(of_kind)} | {len(rids)} | {len(rids & ended)} | {len(done) - len(other)} | {len(other)} |"
        )
    bystanders = [rid for rid in answers if rid not in touched and rid not in ended]
    both, other_count = compare([sound[rid] for rid in bystanders], [answers[rid] for rid in bystanders])
    again = "not run twice without faults"
    if "sound-again" in results:
        again = "two runs without faults: {1} of {0}".format(*compare(base, results["sound-again"]["answers"]))
    errors = [answer for answer in part["answers"] if answer["status"] >= 500]
    partial = sum(
        answers[rid]["tokens"] != sound[rid]["tokens"][: len(answers[rid]["tokens"])] for rid in ended if rid in answers
    )
    return "\n".join(
        [
            *lines,
            f"ended by the plugin: {len(ended)}, of these answered with HTTP 500: {len(errors)}; "
            f"ended though no fault was known to touch them: {len(ended - touched)}",
            f"tokens returned before the end that differ from the sound run: {partial} requests",
            f"requests that no fault touched: {other_count} of {both} with other tokens than without faults; {again}",
            f"server alive afterwards: {part['alive']}; health: {part['health']}",
        ]
    )


def cost(arguments: argparse.Namespace, results: Results) -> str:
    """Pair after pair goes through all numbers of requests, so that what the machine does for a while hits all of them,
    and a run that is cut off has something of each."""
    servers = {
        "off": server(arguments, STEADY, "off", {}),
        "on": server(arguments, STEADY, "on-tags", TAGS, APART),
    }
    with ExitStack() as stack, ThreadPoolExecutor(len(servers)) as pool:
        ports = dict(zip(servers, pool.map(stack.enter_context, servers.values()), strict=True))
        for at_once in arguments.at_once:  # servers still warm up
            for port in ports.values():
                measure(port, at_once, arguments.pairs, arguments.rounds)
        deadline = time.monotonic() + arguments.budget_s
        for pair in range(arguments.pairs):
            for at_once in arguments.at_once:
                name = f"{at_once}/{pair}"
                if name in results or time.monotonic() > deadline:
                    continue
                order = ("off", "on") if pair % 2 else ("on", "off")
                measured = {which: measure(ports[which], at_once, pair, arguments.rounds) for which in order}
                results[name] = measured
                say(f"{name}: {json.dumps(measured)}")
    return cost_table(arguments, results)


def measure(port: int, at_once: int, seed: int, rounds: int) -> dict[str, float]:
    """Tokens a second, and the 95th percentile of a request's seconds, under a closed load; a short round first."""
    answer_all(port, steady_load(seed * 1000 + 999, at_once, 8), at_once)
    load = steady_load(seed * 1000 + at_once, at_once * max(rounds, 8 // at_once), 128)
    started = time.monotonic()
    answers = answer_all(port, load, at_once)
    seconds = time.monotonic() - started
    if bad := [answer for answer in answers if answer.status != 200]:
        raise RuntimeError(f"{len(bad)} requests failed, the first with {bad[0].status}")
    latencies = sorted(answer.seconds for answer in answers)
    p95 = latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))]
    return {"tokens_per_s": sum(len(answer.tokens) for answer in answers) / seconds, "p95_s": p95}


def cost_table(arguments: argparse.Namespace, results: Results) -> str:
    """Medians over the pairs; the change is the median of the pairs' own ratios."""
    lines = [
        "| at once | pairs | tokens/s off | on | change | p95 s off | on | change |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for at_once in arguments.at_once:
        pairs = [value for name, value in results.parts.items() if name.split("/")[0] == str(at_once)]
        if not pairs:
            continue
        cells = []
        for key, digits in (("tokens_per_s", 1), ("p95_s", 4)):
            off, on = ([pair[which][key] for pair in pairs] for which in ("off", "on"))
            ratio = statistics.median(b / a for a, b in zip(off, on, strict=True)) - 1
            cells.append(f"{statistics.median(off):.{digits}f} | {statistics.median(on):.{digits}f} | {ratio:+.2%}")
        lines.append(f"| {at_once} | {len(pairs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["alarms", "faults", "cost"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float, default=0.02, help="faults per scheduling step")
    parser.add_argument("--kinds", default="free+swap+double")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8, 32, 64])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="cost: requests per measurement, times those at once")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--port", type=int, default=PORT, help="side by side: 2,000 apart, after cost 4,000")
    parser.add_argument("--budget-s", type=float, default=300, help="cost: no pair is begun later than this")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FLAG=VALUE", help="server flags, over the script's own"
    )
    parser.add_argument("--once", action="store_true", help="alarms, faults: no second run")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "./out")))
    arguments = parser.parse_args()
    values = {"true": True, "false": False}
    pairs = (word.partition("=") for word in arguments.set)
    arguments.settings = {key: values.get(value, value) for key, _, value in pairs}
    arguments.requests = arguments.requests or {"alarms": 10000}.get(arguments.command, 3000)
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def main() -> None:
    arguments = parse()
    random.seed(0)
    results = Results(arguments.out, arguments.command, arguments.resume)
    try:
        table = {"alarms": alarms, "faults": faults, "cost": cost}[arguments.command](arguments, results)
    except ServerDiedError as error:
        say(str(error))
        raise SystemExit(1) from error
    say(table)
    (arguments.out / f"page-tags-{arguments.command}.md").write_text(table + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

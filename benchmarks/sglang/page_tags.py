"""KV page tags on a real SGLang 0.5.17: false alarms, faults, cost. One table each; see docs/integrity.md.

    python benchmarks/sglang/page_tags.py alarms MODEL [--requests 10000] [--runs without without-again with]
    python benchmarks/sglang/page_tags.py faults MODEL [--requests 3000] [--runs sound sound-again faulty] [--rate 0.02]
                                                       [--kinds free+swap+double] [--at plan] [--rank 0]
    python benchmarks/sglang/page_tags.py cost MODEL [--at-once 1 4 8 32 64] [--pairs 5] [--servers 2]
    all: [--out DIR] [--resume DIR] [--page-size 1] [--set flag=value ...]

MODEL is a folder that SGLang serves; for `cost` a model that is bound by memory bandwidth, such as synthetic.py writes.
Prompts are random token ids, greedy decoding, CUDA graphs, overlap schedule and radix cache on. Each command needs less
than 9 minutes; what it measured is in DIR/page-tags-<command>.json after each part, and --resume takes up the parts
that another run finished. The server's log lies beside it. Needs SGLang on PYTHONPATH, and of kvq only its code.

alarms   one load with shared prefixes, chunked prefill, retraction under memory pressure and aborts by clients, twice
         without the plugin and once with it. The first two say how far SGLang itself gives the same tokens twice.
faults   the same load twice without and once with faults at random times. Which requests a fault touches is in the
         server's log. --at plan+check+results: also between planning and the check, and before results are
         processed. --rank: only this tensor-parallel rank is damaged.
cost     --servers of each kind at once, without and with the plugin; rounds go from one to the next, after one of each
         number of requests that is not counted. Servers of one kind say how much two servers differ by themselves; so
         many on one GPU need --set mem-fraction-static=0.9. Time for the rounds: --budget-s, once all is warm.
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
from itertools import combinations
from pathlib import Path
from typing import Any

from engine import ServerDiedError
from page_tags_client import Load, answer_all, get_json, mixed_load, steady_load
from page_tags_server import serving_tagged

PORT = 30211
FEWEST = 24  # requests of one measurement; of fewer than 21 the 95th percentile is the slowest
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
RANK = r"\[[\d: -]+?(?: DP(\d+))?(?: TP\d+)?\] "  # SGLang's own prefix of a line
VIOLATION = re.compile(RANK + r"KV page tag mismatch: .* for request \S+ (\{.*\})")
FAULT = re.compile(RANK + r"KV page fault injected (\{.*\})")
RUNS = {"alarms": ("without", "without-again", "with"), "faults": ("sound", "sound-again", "faulty"), "cost": ()}


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
        states = get_json(port, "/server_info").get("internal_states", [])
        metrics = "" if not tags else get_json(port, "/metrics/", raw=True)
    log = (arguments.out / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    results[name] = {
        "seconds": seconds, "alive": alive, "retractions": log.count("Retract"),
        "health": [state["kvq_kv_tags"] for state in states if "kvq_kv_tags" in state],
        "metrics": [line for line in metrics.splitlines() if line.startswith("kvq:kv_tag")],
        "answers": [answer.as_json() for answer in answers],
        "violations": logged(VIOLATION, log), "faults": logged(FAULT, log),
    }  # fmt: skip
    say(f"{name}: {len(answers)} requests in {seconds:.0f} s, {results[name]['retractions']} retractions")


def logged(kind: re.Pattern[str], log: str) -> list[dict[str, Any]]:
    """What the log says, with the data-parallel rank that said it; once, where tensor-parallel ranks say the same."""
    return [{"dp": dp, **json.loads(found)} for dp, found in dict.fromkeys(kind.findall(log))]


def compare(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[int, int]:
    """Requests that both runs answered in full, and how many of them with other tokens."""
    both = [(a["tokens"], b["tokens"]) for a, b in zip(one, other, strict=True) if a["full"] and b["full"]]
    return len(both), sum(a != b for a, b in both)


def alarms(arguments: argparse.Namespace, results: Results) -> str:
    load = mixed_load(1, arguments.requests)
    for name in arguments.runs:
        tags = {**TAGS, "KVQ_KV_TAGS_SWEEP_SECONDS": "5"} if name == "with" else {}
        run_load(arguments, results, name, load, tags)
    lines = [
        "| run | requests | cut by clients | retractions | checks | violations | errors | other tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    runs = [name for name in RUNS["alarms"] if name in results]
    base = results[runs[0]]["answers"]
    for name in runs:
        part = results[name]
        both, other = compare(base, part["answers"])
        checks, found = (sum(rank[key] for rank in part["health"]) for key in ("checks", "violations"))
        cut = sum(answer["cut"] for answer in part["answers"])
        errors = sum(answer["status"] != 200 for answer in part["answers"])
        lines.append(
            f"| {name} | {len(part['answers'])} | {cut} | {part['retractions']} | {checks} | {found} | {errors} "
            f"| {other}/{both} |"
        )
    for name in runs:
        lines += [f"health, {name}: {rank}" for rank in results[name]["health"]] + results[name]["metrics"]
    return "\n".join(lines)


def faults(arguments: argparse.Namespace, results: Results) -> str:
    load = mixed_load(2, arguments.requests)
    rank = "" if arguments.rank is None else f",rank={arguments.rank}"
    wanted = f"rate={arguments.rate},seed=5,kinds={arguments.kinds},at={arguments.at}{rank}"
    for name in arguments.runs:
        injected = {"KVQ_KV_TAGS_FAULTS": wanted} if name == "faulty" else {}
        run_load(arguments, results, name, load, {**TAGS, "KVQ_KV_TAGS_SWEEP_SECONDS": "1", **injected})
    return fault_table(results) if "faulty" in results else "no run with faults"


def fault_table(results: Results) -> str:
    """By kind: requests that referred to the page; of these, ended by the plugin, or finished before they read it."""
    part = results["faulty"]
    base = results["sound"]["answers"] if "sound" in results else []
    answers = {answer["rid"]: answer for answer in part["answers"]}
    sound = {answer["rid"]: answer for answer in base}
    ended = {found["rid"] for found in part["violations"]}
    lines = ["| fault | injected | requests that referred to the page | ended | finished |", "|---|---|---|---|---|"]
    touched: set[str] = set()
    finished: list[str] = []
    for kind in ("free", "swap", "double"):
        of_kind = [fault for fault in part["faults"] if fault["kind"] == kind]
        if kind == "double":  # whoever was given the page afterwards
            pages = {(fault["dp"], fault["page"]) for fault in of_kind}
            rids = {found["rid"] for found in part["violations"] if (found["dp"], found["page"]) in pages} - touched
        else:
            rids = {rid for fault in of_kind for rid in fault["affected"] if rid in answers}
            finished += [
                f"{kind} before {fault['at']}: {left}"
                for fault in of_kind
                for rid, left in zip(fault["affected"], fault["tokens_left"], strict=True)
                if rid in answers and rid not in ended
            ]
        touched |= rids
        lines.append(f"| {kind} | {len(of_kind)} | {len(rids)} | {len(rids & ended)} | {len(rids - ended)} |")
    errors = [answer for answer in part["answers"] if answer["status"] >= 500]
    lines += [
        f"ended by the plugin: {len(ended)}, of these answered with HTTP 500: {len(errors)}; "
        f"ended though no fault was known to touch them: {len(ended - touched)}",
        f"tokens that those which finished still had to be given: {', '.join(finished) or '-'}",
        f"answers of no status: {sum(answer['status'] == 0 for answer in part['answers'])}; "
        f"server alive afterwards: {part['alive']}; health: {part['health']}",
    ]
    return "\n".join(lines + (tokens_beside(results, answers, sound, ended, touched) if sound else []))


def tokens_beside(
    results: Results, answers: dict[str, Any], sound: dict[str, Any], ended: set[str], touched: set[str]
) -> list[str]:
    """Tokens of the run with faults beside those of the run without."""
    done = [rid for rid in touched - ended if answers[rid]["full"] and sound[rid]["full"]]
    partial = sum(
        answers[rid]["tokens"] != sound[rid]["tokens"][: len(answers[rid]["tokens"])] for rid in ended if rid in answers
    )
    bystanders = [rid for rid in answers if rid not in touched and rid not in ended]
    both, other = compare([sound[rid] for rid in bystanders], [answers[rid] for rid in bystanders])
    again = "not run twice without faults"
    if "sound-again" in results:
        first, second = (results[name]["answers"] for name in ("sound", "sound-again"))
        again = "two runs without faults: {1} of {0}".format(*compare(first, second))
    return [
        f"finished though a fault touched them: {sum(answers[rid]['tokens'] != sound[rid]['tokens'] for rid in done)} "
        f"of {len(done)} with other tokens",
        f"tokens returned before the end that differ from the sound run: {partial} requests",
        f"requests that no fault touched: {other} of {both} with other tokens than without faults; {again}",
    ]


def cost(arguments: argparse.Namespace, results: Results) -> str:
    """Pair after pair goes through all numbers of requests, so that what the machine does for a while hits all of them,
    and a run that is cut off has something of each."""
    kinds: dict[str, dict[str, str]] = {"off": {}, "on": TAGS}
    names = [(f"{kind}-{number}", tags) for number in range(arguments.servers) for kind, tags in kinds.items()]
    servers = {name: server(arguments, STEADY, name, tags, APART * place) for place, (name, tags) in enumerate(names)}
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
                order = list(ports) if pair % 2 else list(reversed(ports))
                measured = {which: measure(ports[which], at_once, pair, arguments.rounds) for which in order}
                results[name] = measured
                say(f"{name}: {json.dumps(measured)}")
    return cost_table(arguments, results)


def measure(port: int, at_once: int, seed: int, rounds: int) -> dict[str, float]:
    """Tokens a second, and the 95th percentile of a request's seconds, under a closed load; a short round first."""
    answer_all(port, steady_load(seed * 1000 + 999, at_once, 8), at_once)
    load = steady_load(seed * 1000 + at_once, at_once * max(rounds, FEWEST // at_once), 128)
    started = time.monotonic()
    answers = answer_all(port, load, at_once)
    seconds = time.monotonic() - started
    if bad := [answer for answer in answers if answer.status != 200]:
        raise RuntimeError(f"{len(bad)} requests failed, the first with {bad[0].status}")
    latencies = sorted(answer.seconds for answer in answers)
    p95 = latencies[min(len(latencies) - 1, int(0.95 * len(latencies)))]
    return {"tokens_per_s": sum(len(answer.tokens) for answer in answers) / seconds, "p95_s": p95}


def cost_table(arguments: argparse.Namespace, results: Results) -> str:
    """Medians over the pairs; the change is the median of the pairs' own ratios, each of the means over the servers.
    Two of a kind differ: the median, over pairs of rounds and kinds, of what one server is off another."""
    lines = [
        "| at once | pairs | tokens/s off | on | change | all pairs | two of a kind differ "
        "| p95 s off | on | change | all pairs | two of a kind differ |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for at_once in arguments.at_once:
        pairs = [value for name, value in results.parts.items() if name.split("/")[0] == str(at_once)]
        if not pairs:
            continue
        cells = [cost_cells(pairs, key, digits) for key, digits in (("tokens_per_s", 1), ("p95_s", 4))]
        lines.append(f"| {at_once} | {len(pairs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_cells(pairs: list[dict[str, dict[str, float]]], key: str, digits: int) -> str:
    off, on = (
        [statistics.mean(value[key] for name, value in pair.items() if name.startswith(kind)) for pair in pairs]
        for kind in ("off", "on")
    )
    changes = [b / a - 1 for a, b in zip(off, on, strict=True)]
    cells = [f"{statistics.median(values):.{digits}f}" for values in (off, on)]
    cells += [f"{statistics.median(changes):+.2%}", ", ".join(f"{change:+.1%}" for change in changes)]
    apart = [
        abs(other[key] / one[key] - 1)
        for pair in pairs
        for kind in ("off", "on")
        for one, other in combinations([value for name, value in pair.items() if name.startswith(kind)], 2)
    ]
    return " | ".join([*cells, f"{statistics.median(apart):.1%}" if apart else "-"])


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
    parser.add_argument("--at", default="plan", help="faults: moments of a step, joined by +")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8, 32, 64])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="cost: requests per measurement, times those at once")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--port", type=int, default=PORT, help="side by side: 2,000 apart for each server")
    parser.add_argument("--budget-s", type=float, default=300, help="cost: no pair is begun later than this")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FLAG=VALUE", help="server flags, over the script's own"
    )
    parser.add_argument("--runs", nargs="+", help="alarms, faults: which runs; default all three")
    parser.add_argument("--rank", type=int, help="faults: of this tensor-parallel rank only")
    parser.add_argument("--servers", type=int, default=1, help="cost: of each kind")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "./out")))
    arguments = parser.parse_args()
    values = {"true": True, "false": False}
    pairs = (word.partition("=") for word in arguments.set)
    arguments.settings = {key: values.get(value, value) for key, _, value in pairs}
    arguments.requests = arguments.requests or {"alarms": 10000}.get(arguments.command, 3000)
    known = RUNS[arguments.command]
    if unknown := set(arguments.runs or ()) - set(known):
        parser.error(f"--runs {' '.join(sorted(unknown))}: {arguments.command} has {', '.join(known) or 'none'}")
    arguments.runs = arguments.runs or known
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

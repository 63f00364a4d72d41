"""Give the readers hostile input: `python -m tests.fuzz.run --inputs 200000 --seed 1`.

Each input ends in KvqError or is accepted; no other exception, no minute without an end, no growth of memory, no file
outside the target's folder opened or changed, nothing executed or unpickled.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from kvq.errors import KvqError
from tests.fuzz.hostile import SECRET, Guard, peak_megabytes
from tests.fuzz.target import Target
from tests.fuzz.targets import all_targets
from tests.fuzz.text_targets import limit_tokenizers

MAX_MORE_MEGABYTES = 300
BLOCK = 50
ADDRESS_SPACE = 8 * 2**30


def fuzz(target: Target, guard: Guard, inputs: int, seed_number: int) -> dict[str, Any]:
    """Give so many inputs to one target; raises what hypothesis found, reduced to the smallest."""
    counts = {"inputs": 0, "refused": 0}

    def read(draw: Random) -> None:
        data = target.make(draw)
        counts["inputs"] += 1
        try:
            with guard.watch(target.folder):
                target.read(data)
        except KvqError as error:
            counts["refused"] += 1
            message = str(error)
            assert message.isprintable() and len(message) < 3000, message
        except BaseException as error:
            note(f"{target.name}: {error!r} for {data!r}"[:3000])
            raise

    def block(draw: Random) -> None:
        for _ in range(BLOCK):
            read(draw)

    examples = max(1, inputs // BLOCK - min(200, inputs // 2) // BLOCK)
    before, started = peak_megabytes(), time.monotonic()
    # Drawn through hypothesis, a failure is reduced; from a seed that it draws, a hundred times as many are read.
    _given(st.randoms(use_true_random=False), min(200, inputs // 2), seed_number, read)
    while counts["inputs"] < inputs:
        _given(st.randoms(use_true_random=True), examples, seed_number + counts["inputs"], block)
    grown = peak_megabytes() - before
    assert grown <= MAX_MORE_MEGABYTES, f"{target.name}: {grown} MB more"
    return {"target": target.name, **counts, "MB more": grown, "seconds": round(time.monotonic() - started, 1)}


def _given(draws: st.SearchStrategy[Random], examples: int, seed_number: int, test: Callable[[Random], None]) -> None:
    """Let hypothesis call the test so often."""
    chosen = settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink), print_blob=False,
    )  # fmt: skip
    seed(seed_number)(chosen(given(draws)(test)))()


def run(scratch: Path, inputs: int, seed_number: int, only: Sequence[str] = ("",)) -> list[dict[str, Any]]:
    """All targets, each with its share of the inputs."""
    (scratch / SECRET).mkdir()
    (scratch / SECRET / "secret").write_text("{}")
    targets = [target for target in all_targets(scratch) if any(part in target.name for part in only)]
    guard = Guard()
    reports = []
    for target in targets:
        reports.append(fuzz(target, guard, max(10, round(inputs * target.share)), seed_number))
        sys.stderr.write(json.dumps(reports[-1]) + "\n")
    assert (scratch / SECRET / "secret").read_text() == "{}"
    return reports


def _limit_memory() -> None:
    """What would take all of the machine's memory shall end as a MemoryError."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[""], help="targets whose name holds one of these")
    arguments = parser.parse_args()
    _limit_memory()
    limit_tokenizers()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        reports = run(Path(scratch), arguments.inputs, arguments.seed, arguments.only)
    total = {
        "seed": arguments.seed, "inputs": sum(row["inputs"] for row in reports),
        "MB of the largest child": peak_megabytes(resource.RUSAGE_CHILDREN), "targets": reports,
    }  # fmt: skip
    sys.stdout.write(json.dumps(total, indent=2) + "\n")


if __name__ == "__main__":
    main()

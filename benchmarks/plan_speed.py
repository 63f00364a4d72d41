"""Seconds and peak memory of `kvq plan` on a folder the size of GLM-5.2-FP8: 141 shards, 118,629 tensors.

The folder is made from the facts that ship with kvq: real headers and index, sparse files of the real sizes.

    python benchmarks/plan_speed.py [--runs 5]
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvq.checkpoint.facts import known_checkpoint, published_index
from kvq.checkpoint.header import TensorInfo
from kvq.checkpoint.index import INDEX_NAME

ALIAS, SHARDS = "glm-5.2", 141
LIMIT_SECONDS, LIMIT_BYTES = 3.0, 300e6


def cut(tensors: list[TensorInfo], parts: int) -> Iterator[list[TensorInfo]]:
    """Runs of about the same number of tensors."""
    for part in range(parts):
        yield tensors[part * len(tensors) // parts : (part + 1) * len(tensors) // parts]


def write_sparse_shard(path: Path, tensors: list[TensorInfo]) -> None:
    """A whole safetensors file whose data are a hole."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes],
        }  # fmt: skip
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def make_folder(folder: Path, shards: int = SHARDS, alias: str = ALIAS) -> None:
    """Config, index and sparse shards of a published checkpoint."""
    known = known_checkpoint(alias)
    tensors = list(published_index(known).tensors.values())
    weight_map: dict[str, str] = {}
    for number, part in enumerate(cut(tensors, shards), start=1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        write_sparse_shard(folder / name, part)
        weight_map.update((tensor.name, name) for tensor in part)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(known.config, indent=2))


def measure(folder: Path) -> tuple[float, float, int]:
    """Wall seconds, processor seconds and peak resident bytes of one `kvq plan` in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = [sys.executable, "-m", "kvq", "plan", str(folder), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)["source"]["tensors"] == len(published_index(known_checkpoint(ALIAS)).tensors)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_folder(folder)
        results = [measure(folder) for _ in range(runs)]
    seconds, cpu = (sorted(result[column] for result in results) for column in (0, 1))
    peak = max(result[2] for result in results)
    report = {
        "date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(), "runs": runs, "seconds_min": round(seconds[0], 2),
        "seconds_median": round(seconds[runs // 2], 2), "cpu_seconds_median": round(cpu[runs // 2], 2),
        "peak_bytes": peak, "within_limits": seconds[runs // 2] < LIMIT_SECONDS and peak < LIMIT_BYTES,
    }  # fmt: skip
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

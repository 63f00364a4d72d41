"""Two ranks on one machine, started as people start them: the same checkpoint, and nothing lost when one of them dies.

Results are not byte for byte those of one rank: sums over the layer's tokens are taken in another order, which turns
ties of rounding.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvq.checkpoint.journal import FOLDER, Journal, Step
from kvq.checkpoint.packing import unpack_int4
from kvq.errors import RecipeError
from kvq.shares import check_even, share
from kvq.verify.checks import verify_checkpoint
from tests.checkpoints import make_checkpoint
from tests.runs import SETTINGS, fresh_environment, manifest_of, output_bytes, quantize, write_calibration

PATIENCE = 240


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Pair:
    """A source, and runs of two ranks into one output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.source = make_checkpoint(folder / "source", "glm_moe_dsa", "fp8_block", block_size=(32, 32))
        self.calibration = write_calibration(folder / "calibration.jsonl")

    def start(self) -> "subprocess.Popen[str]":
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port()),
        ]
        words += ["-m", "kvq", "quantize", str(self.source), "--w", "int4", "--out", str(self.out)]
        words += ["--calibration", str(self.calibration), "--device", "cpu"]
        words += [word for setting in SETTINGS for word in ("--set", setting)]
        environment = {**fresh_environment(), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            words, env=environment, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self) -> str:
        process = self.start()
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
        return said


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Has run once; the output lies in `whole`."""
    made = Pair(tmp_path_factory.mktemp("ranks"))
    made.run()
    shutil.copytree(made.out, made.folder / "whole")
    return made


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def codes(packed_OW: torch.Tensor) -> torch.Tensor:
    return unpack_int4(packed_OW, packed_OW.shape[1] * 8)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def test_two_ranks_write_what_one_rank_writes(pair: Pair) -> None:
    whole = pair.folder / "whole"
    with one_thread():
        alone = quantize(pair.source, pair.folder / "alone", pair.calibration)
    report = verify_checkpoint(whole, pair.source, lambda done, total: None)
    assert report.passed, report.failure()
    ours, theirs = tensors(whole), tensors(pair.folder / "alone")
    assert ours.keys() == theirs.keys()
    packed = [name for name in ours if name.endswith("weight_packed")]
    kept = [name for name in ours if not name.endswith(("_packed", "_scale", "_shape")) or ".experts." not in name]
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in kept)
    first = [name for name in packed if name.startswith("model.layers.1.")]
    same = [(codes(ours[name]) == codes(theirs[name])).flatten() for name in first]
    assert float(torch.cat(same).float().mean()) > 0.999
    summary = manifest_of(whole)["summary"]
    for key in ("mean_relative_weight_error", "mean_relative_output_error"):
        assert summary[key] == pytest.approx(alone["summary"][key], rel=0.03)


def test_each_rank_writes_its_own_experts(pair: Pair) -> None:
    shards = sorted((pair.folder / "whole").glob("*.safetensors"))
    owners = [
        {int(name.split(".experts.")[1].split(".")[0]) for name in load_file(s) if ".experts." in name} for s in shards
    ]
    assert [len(one) for one in owners if one] and not any(
        a & b for a, b in zip(owners[2::2], owners[3::2], strict=False)
    )
    results = manifest_of(pair.folder / "whole")["modules"]
    assert all(row["num_tokens"] is not None for row in (results.values() if isinstance(results, dict) else results))


@pytest.mark.parametrize(("rank", "step"), [(1, 1), (0, 2)])
def test_a_killed_rank_ends_the_run_and_the_run_goes_on(pair: Pair, rank: int, step: int) -> None:
    shutil.rmtree(pair.out, ignore_errors=True)
    process = pair.start()
    record = pair.folder / "out.partial" / FOLDER / f"step-{step:05d}{'-rank1' if rank else ''}.json"
    deadline = time.monotonic() + PATIENCE
    while not record.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)
    os.kill(rank_process(process.pid, rank), signal.SIGKILL)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0 and f"rank      : {rank}" in said
    assert not pair.out.exists() and (pair.folder / "out.partial").exists()
    pair.run()
    assert output_bytes(pair.out) == output_bytes(pair.folder / "whole")
    assert not (pair.folder / "out.partial").exists()


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank below its launcher."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == launcher:
                if f"\0RANK={rank}\0".encode() in b"\0" + (folder / "environ").read_bytes():
                    return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank} below {launcher}")


@pytest.mark.parametrize(("count", "size"), [(8, 2), (8, 3), (5, 8)])
def test_shares_are_everything_once(count: int, size: int) -> None:
    parts = [share(count, rank, size) for rank in range(size)]
    assert [one for part in parts for one in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_experts_that_cannot_be_shared_are_refused() -> None:
    check_even(256, 8)
    with pytest.raises(RecipeError, match=r"3 ranks cannot share 256 experts evenly; start \[1, 2, 4, 8"):
        check_even(256, 3)


def step_of(number: int, shard: str) -> Step:
    return Step(number, shard, "0" * 64, {}, [], None)


def test_a_step_counts_when_every_rank_has_recorded_it(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    ranks = [Journal(partial, rank, 2) for rank in range(2)]
    ranks[0].begin({"recipe": "a"})
    ranks[1].follow({"recipe": "a"})
    for number in range(3):
        (partial / f"a{number}").touch()
        ranks[0].finish_step(step_of(number, f"a{number}"), None)
    for number in range(2):
        (partial / f"b{number}").touch()
        ranks[1].finish_step(step_of(number, f"b{number}"), None)
    ranks[0].close()
    again = [Journal(partial, rank, 2) for rank in range(2)]
    again[0].begin({"recipe": "a"})
    again[1].follow({"recipe": "a"})
    assert [len(journal.steps) for journal in again] == [2, 2]
    assert {path.name for path in partial.iterdir() if path.is_file()} == {"a0", "a1", "b0", "b1"}
    assert not (partial / FOLDER / "step-00002.json").exists()
    again[0].close()

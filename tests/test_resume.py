"""A run that was cut off anywhere goes on to the same bytes, and only if nothing that matters has changed."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvq.checkpoint.journal import FOLDER, keeps_state, parked
from kvq.checkpoint.source import resolve_source
from kvq.errors import OutputError, StoppedError
from kvq.pipeline import prepare, quantize_checkpoint
from kvq.publish.kv_run import REPORT_FILE
from kvq.recipes.schema import load_recipe, override
from kvq.stop import StopRequest
from tests.checkpoints import TINY, edit_config, make_checkpoint
from tests.runs import SETTINGS, Quiet, fresh_environment, write_calibration

# Sequences longer than what the indexer selects: the selection is part of the state that is kept.
DIMS = {"glm_moe_dsa": replace(TINY, index_topk=16), "glm4_moe": TINY, "kimi_k2": TINY}
SOURCES = {"glm_moe_dsa": "fp8_block", "glm4_moe": "fp8_channel", "kimi_k2": "fp8_block"}


class Cut(BaseException):
    """What kills a run in these tests; no handler for errors may stop it."""


class CutAt(Quiet):
    """Dies at the n-th thing that a run tells."""

    def __init__(self, number: int) -> None:
        self.left = number

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Cut

    def stage(self, layer: int | None, num_layers: int, text: str) -> None:
        self._count()

    def layer_done(self, layer: int, num_layers: int) -> None:
        self._count()


class Bench:
    """One source, and runs of it into one output."""

    def __init__(self, folder: Path, family: str) -> None:
        self.source = make_checkpoint(folder / "source", family, SOURCES[family], DIMS[family], block_size=(32, 32))
        self.calibration = write_calibration(folder / "calibration.jsonl")
        self.out = folder / "out"
        self.partial = folder / "out.partial"

    def run(self, progress: Quiet, *settings: str, restart: bool = False, stop: StopRequest | None = None) -> None:
        recipe = override(load_recipe("int4"), [*SETTINGS, *settings])
        source = resolve_source(str(self.source))
        prepared = prepare(source, recipe, self.out, device="cpu", calibration=self.calibration)
        quantize_checkpoint(prepared, progress, restart=restart, stop=stop)

    def contents(self) -> dict[str, bytes]:
        files = (path for path in self.out.rglob("*") if path.is_file())
        return {str(path.relative_to(self.out)): path.read_bytes() for path in files}

    def remove_output(self) -> dict[str, bytes]:
        contents = self.contents()
        shutil.rmtree(self.out)
        return contents


def cut_until_done(bench: Bench, first: int, *settings: str) -> int:
    """Cut the first run after `first` words, each later one a little after; gives the number of runs."""
    for runs in range(1, 100):
        try:
            bench.run(CutAt(first + runs), *settings)
        except Cut:
            assert not bench.out.exists()
        else:
            return runs
    raise AssertionError("never finished")


@pytest.mark.parametrize("family", SOURCES)
def test_cut_again_and_again_gives_the_same_bytes(tmp_path: Path, family: str) -> None:
    bench, kv = Bench(tmp_path, family), "kv_scales=calibrate"  # statistics of all layers end in one file
    bench.run(Quiet(), kv)
    straight = bench.remove_output()
    assert REPORT_FILE in straight
    assert cut_until_done(bench, 2, kv) > 2
    assert bench.contents() == straight
    assert not bench.partial.exists() and not (bench.out / FOLDER).exists()


def dying(real: Callable[..., None], number: int) -> Callable[..., None]:
    """A function that dies at its n-th call, before it does anything."""
    calls = 0

    def replacement(*arguments: object, **options: object) -> None:
        nonlocal calls
        calls += 1
        if calls > number:
            raise Cut
        real(*arguments, **options)

    return replacement


@pytest.mark.parametrize("function", ["fsync", "rename"])
def test_cut_at_every_durable_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Between any two steps of making something durable there is a state to go on from."""
    bench = Bench(tmp_path, "kimi_k2")
    bench.run(Quiet())
    straight = bench.remove_output()
    number = 0
    while not bench.out.exists():
        real = os.fsync if function == "fsync" else Path.rename
        with monkeypatch.context() as patch:
            patch.setattr(os if function == "fsync" else Path, function, dying(real, number))
            with contextlib.suppress(Cut):
                bench.run(Quiet())
        number += 1
    assert number > 3
    assert bench.contents() == straight


def changed_recipe(bench: Bench) -> None:
    bench.run(Quiet(), "dampening_frac=0.02")


def changed_calibration(bench: Bench) -> None:
    bench.calibration.write_text(bench.calibration.read_text().replace("[", "[1, ", 1))
    bench.run(Quiet())


def changed_source(bench: Bench) -> None:
    edit_config(bench.source, lambda config: config.update(rms_norm_eps=1e-4))
    bench.run(Quiet())


@pytest.mark.parametrize(
    ("change", "named"),
    [(changed_recipe, "recipe"), (changed_calibration, "calibration data"), (changed_source, "source files")],
)
def test_another_run_may_not_go_on(tmp_path: Path, change: Callable[[Bench], None], named: str) -> None:
    bench = Bench(tmp_path, "kimi_k2")
    with pytest.raises(Cut):
        bench.run(CutAt(8))
    with pytest.raises(OutputError, match=f"another {named} .*--restart"):
        change(bench)
    assert bench.partial.exists() and not bench.out.exists()
    bench.run(Quiet(), restart=True)
    assert bench.out.exists() and not bench.partial.exists()


def test_changed_shard_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "kimi_k2")
    with pytest.raises(Cut):
        bench.run(CutAt(12))
    shard = sorted(bench.partial.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(OutputError, match=f"{shard.name} has changed since it was written"):
        bench.run(Quiet())


def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "kimi_k2")
    with pytest.raises(Cut):
        bench.run(CutAt(8))
    with (bench.partial / FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another run is writing there"):
            bench.run(Quiet())
    bench.run(Quiet())


def test_a_restart_leaves_alone_what_another_run_is_at(tmp_path: Path) -> None:
    """Else the other would go on writing, by the same names, into what this one then calls finished."""
    bench = Bench(tmp_path, "kimi_k2")
    with pytest.raises(Cut):
        bench.run(CutAt(8))
    before = {path: path.stat().st_mtime_ns for path in sorted(bench.partial.rglob("*.*"))}
    with (bench.partial / FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another run is writing there"):
            bench.run(Quiet(), "dampening_frac=0.02", restart=True)
    assert before == {path: path.stat().st_mtime_ns for path in sorted(bench.partial.rglob("*.*"))}
    bench.run(Quiet(), "dampening_frac=0.02", restart=True)


def test_a_run_that_is_giving_its_output_the_name_is_left_to_it(tmp_path: Path) -> None:
    """Its journal is parked for that moment: nobody takes it back, and nobody clears it away."""
    bench = Bench(tmp_path, "kimi_k2")
    with pytest.raises(Cut):
        bench.run(CutAt(8))
    journal = parked(bench.partial)
    (bench.partial / FOLDER).rename(journal)
    with (journal / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another run is writing there"):
            bench.run(Quiet())
        bench.partial.rename(bench.out)
        with pytest.raises(OutputError, match="is not empty"):
            bench.run(Quiet())
        assert (journal / "fingerprint.json").exists()
    with pytest.raises(OutputError, match="is not empty"):
        bench.run(Quiet())
    assert not journal.exists(), "that run is gone; what it left is cleared away"


def test_stop_request_finishes_the_layer(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "kimi_k2")
    bench.run(Quiet())
    straight = bench.remove_output()
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    with pytest.raises(StoppedError, match=r"Stopped after layer 1 of 3\. What is finished is kept") as caught:
        bench.run(Quiet(), stop=stop)
    assert caught.value.exit_code == 143
    assert (bench.partial / FOLDER / "step-00001.json").exists()
    bench.run(Quiet())
    assert bench.contents() == straight


def test_second_signal_stops_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert "a second signal stops at once" in capfd.readouterr().err


def other_weights(bench: Bench) -> None:
    """The same names, shapes and sizes, as a later training of the same model has them."""
    make_checkpoint(bench.source, "kimi_k2", "fp8_block", DIMS["kimi_k2"], seed=1, block_size=(32, 32))


def damage_journal(name: str, change: Callable[[bytes], bytes]) -> Callable[[Bench], None]:
    def damage(bench: Bench) -> None:
        (path,) = (bench.partial / FOLDER).glob(name)
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert path.read_bytes() != before

    return damage


def number_as_fraction(data: bytes) -> bytes:
    """-0.0 where 0 was, which is equal to it, under a hash that fits."""
    record = {**json.loads(data)["record"], "number": -0.0}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return json.dumps({"sha256": digest, "record": record}).encode()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (other_weights, "another source files"),
        (damage_journal("step-00002.json", lambda data: data.replace(b"solved", b"sulved", 1)), "is damaged"),
        (damage_journal("step-00000.json", number_as_fraction), "is damaged"),
        (damage_journal("step-00001.json", lambda data: data[:-9]), "not valid JSON"),
        (damage_journal("state-*", lambda data: data[:-1] + bytes([data[-1] ^ 1])), "has changed since it was written"),
        (damage_journal("fingerprint.json", lambda data: data.replace(b"sglang", b"sglanf")), "is damaged"),
    ],
)
def test_damage_between_two_runs_is_refused(tmp_path: Path, damage: Callable[[Bench], None], says: str) -> None:
    bench = Bench(tmp_path, "kimi_k2")
    with pytest.raises(Cut):
        bench.run(CutAt(12))
    damage(bench)
    with pytest.raises(OutputError, match=f"{says}.*--restart"):
        bench.run(Quiet())
    assert not bench.out.exists()
    bench.run(Quiet(), restart=True)
    assert bench.out.exists() and not bench.partial.exists()


def test_restart_that_is_cut_off_can_be_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a cut-off `--restart` has left, nothing of the old run is believed afterwards."""
    bench = Bench(tmp_path, "kimi_k2")
    bench.run(Quiet(), "dampening_frac=0.02")
    straight = bench.remove_output()
    for number in range(60):
        if not bench.partial.exists():
            with pytest.raises(Cut):
                bench.run(CutAt(12))
        with monkeypatch.context() as patch, contextlib.suppress(Cut):
            patch.setattr(os, "unlink", dying(os.unlink, number))
            bench.run(Quiet(), "dampening_frac=0.02", restart=True)
        if bench.out.exists():
            break
    assert number > 3 and bench.contents() == straight


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_process(tmp_path: Path, number: signal.Signals) -> None:
    """A real process, killed as soon as its first layer is durable, and the same command again."""
    bench = Bench(tmp_path, "kimi_k2")
    settings = [flag for setting in SETTINGS for flag in ("--set", setting)]
    command = [sys.executable, "-m", "kvq", "quantize", str(bench.source), *settings]
    command += ["--calibration", str(bench.calibration), "--out", str(bench.out), "--device", "cpu"]
    process = subprocess.Popen(command, env=fresh_environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    first_layer = bench.partial / FOLDER / "step-00001.json"
    while process.poll() is None and not first_layer.exists():
        time.sleep(0.002)
    process.send_signal(number)
    _, words = process.communicate()
    if process.returncode != 0:  # it may have been quicker than the signal
        assert process.returncode == (-9 if number == signal.SIGKILL else 143), words.decode()
        assert not bench.out.exists() and b"Traceback" not in words
    if not bench.out.exists():
        bench.run(Quiet())
    resumed = bench.remove_output()
    bench.run(Quiet())
    assert resumed == bench.contents()


@pytest.mark.parametrize(
    ("nbytes", "device", "kept"),
    [
        (0, "cuda", [0, 1, 2, 3, 4]), (2**20, "cuda", [0, 1, 2, 3, 4]), (2**30, "cuda", [0, 2, 4]),
        (2**30 + 1, "cuda", [0, 3]), (2**30, "cpu", [0, 1, 2, 3, 4]), (5 * 2**30, "cpu", [0, 3]),
    ],
)  # fmt: skip
def test_large_states_are_kept_every_few_layers(nbytes: int, device: str, kept: list[int]) -> None:
    assert [number for number in range(5) if keeps_state(number, nbytes, device)] == kept

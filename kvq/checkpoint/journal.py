"""The journal of a run: what is finished and durable, so that a run that was stopped goes on where it was.

It lives in `<out>.partial/.kvq-journal/` and is gone from the finished folder:

    fingerprint.json     what the run depends on; a run with any other value may not continue this one
    step-00004.json      step 4 is finished: its shard with its hash, its results, the state that step 5 starts from
    state-00004.safetensors

A step counts when its JSON file has its name, which it gets by a rename after everything that it names is on disk.
Each JSON file holds a `record` and its `sha256`: a damaged record is refused, not believed.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvq.checkpoint.hashing import sha256_file
from kvq.checkpoint.index import load_json
from kvq.errors import CheckpointError, OutputError

FOLDER = ".kvq-journal"
FINGERPRINT = "fingerprint.json"
LOCK = "lock"
STATE_BYTES = {"cpu": 2 * 2**30, "cuda": 2**29}
"""Hidden states of all ranks to write for each layer, on average, by the device that computes. Larger ones are kept
every few layers; in between, a run that is cut off computes those layers again, which costs less than the writes: the
next layer waits for them, and on two H200s whose layers take 6 s it waited 14 s for 12 GiB."""


def keeps_state(number: int, nbytes: int, device_type: str) -> bool:
    """Whether the state after step `number` is kept. `nbytes` are those of all ranks, so that they keep the same."""
    return number % -(-nbytes // STATE_BYTES[device_type]) == 0 if nbytes else True


MAX_RECORD_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Step:
    """A finished step. `tensors` maps the names in its shard to their bytes; `state` names a file of the journal,
    `kv` holds statistics of what the layer would keep in a KV cache.

    After a step that is not `resumable` (its state was too large to keep every time) a run goes on from the last that
    is.
    """

    number: int
    shard: str
    sha256: str
    tensors: Mapping[str, int]
    results: list[dict[str, Any]]
    state: str | None
    state_sha256: str | None = None
    resumable: bool = True
    kv: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Journal:
    """Open for one run at a time: a lock is held until `close`.

    Of a run with several ranks each has its own records and states; a step is finished when all have recorded it. Rank
    0 takes the folder, then the others `follow`. States stay for two steps more, since ranks do not finish in step.
    """

    partial: Path
    rank: int = 0
    size: int = 1
    steps: list[Step] = field(default_factory=list)
    _lock: IO[str] | None = None

    @property
    def folder(self) -> Path:
        return self.partial / FOLDER

    def follow(self, fingerprint: Mapping[str, Any]) -> None:
        """Take over what rank 0 has found finished when it took the folder.

        Raises OutputError when that is not here: on another host, without a file system that both see.
        """
        path = self.folder / FINGERPRINT
        if FINGERPRINT not in self._names():
            raise OutputError(
                f"{path} is not there for rank {self.rank} on {socket.gethostname()}, though rank 0 has written it. "
                "Choose an --out that lies on a file system of all hosts, and under the same path."
            )
        self._compare(_read_record(path), fingerprint)
        self.steps = self._finished(self.rank)

    def all_steps(self) -> list[list[Step]]:
        """The finished steps of every rank. Raises OutputError when another rank's cannot be seen here."""
        everybody = [self.steps if rank == self.rank else self._finished(rank) for rank in range(self.size)]
        for rank, steps in enumerate(everybody):
            if len(steps) != len(self.steps):
                raise OutputError(
                    f"{self.folder}: rank {rank} has finished {len(self.steps)} steps, and {len(steps)} of its records "
                    "are there. Is it one file system on all hosts? Run the same command again to go on."
                )
        return everybody

    def _names(self) -> set[str]:
        """What lies in the folder. Listing it makes a network file system look again for what other hosts have made."""
        return set(os.listdir(self.folder)) if self.folder.is_dir() else set()

    def state_name(self, number: int) -> str:
        return f"state-{number:05d}{_suffix(self.rank)}.safetensors"

    def begin(self, fingerprint: Mapping[str, Any], *, restart: bool = False) -> None:
        """Take the folder, new or left by a run with the same fingerprint; `steps` then holds what is finished.

        `restart` discards what another run left, whatever its fingerprint; never what one is at work on. Raises
        OutputError when another run holds the folder, when it depends on something else, or has no journal.
        """
        if self.partial.exists() and not can_continue(self.partial):
            raise OutputError(f"{self.partial} is in the way and no run of kvq. Remove it, or choose another --out.")
        try:
            if self._parked.is_dir() and not self.folder.exists() and self.partial.exists():
                self._lock = _lock(self._parked)
                self._parked.rename(self.folder)  # cut off between the last two renames of `publish`
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = _lock(self.folder)
        except BlockingIOError:
            self.close()
            raise OutputError(f"{self.partial}: another run is writing there. Choose another --out.") from None
        except OSError as error:
            self.close()
            raise OutputError(f"{self.partial}: cannot be made ({error.strerror}). Choose another --out.") from None
        try:
            if restart:
                self._discard()
            self._take(fingerprint)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise OutputError(
                    f"{self.partial}: writing failed ({error.strerror}). Make room, and run the same command again."
                ) from error
            raise

    def _discard(self) -> None:
        """Remove what a run left, its journal last: cut off anywhere, the rest is still recognized as a run's. The lock
        stays: whoever looks at the folder meanwhile finds it taken."""
        for path in self.partial.iterdir():
            if path != self.folder:
                _remove(path)
        if self._parked.is_dir():
            shutil.rmtree(self._parked)
        (self.folder / FINGERPRINT).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.name != LOCK:
                _remove(path)

    def _take(self, fingerprint: Mapping[str, Any]) -> None:
        path = self.folder / FINGERPRINT
        if path.exists():
            self._compare(_read_record(path), fingerprint)
            self.steps = self._finished(self.rank)
        else:
            for stale in self.folder.glob("step-*"):  # `_discard` was cut off
                stale.unlink()
            sync_folder(self.partial.absolute().parent)
            self._write(path, dict(fingerprint))
        self._drop_unfinished()

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for key in (*now, *(key for key in before if key not in now)):
            if before.get(key) != now.get(key):
                raise OutputError(
                    f"{self.partial} was left by a run with another {key} ({_short(before.get(key))}, now "
                    f"{_short(now.get(key))}). Run the same command as then to go on, or add --restart to discard it."
                )

    def _finished(self, rank: int) -> list[Step]:
        """A rank's steps up to the last that all ranks have finished and can go on from."""
        everybody = [self._recorded(one) for one in range(self.size)]
        count = min(map(len, everybody))
        while count and not all(steps[count - 1].resumable for steps in everybody):
            count -= 1
        return everybody[rank][:count]

    def _recorded(self, rank: int) -> list[Step]:
        steps: list[Step] = []
        names = self._names()
        while (path := self._record_path(len(steps), rank)).name in names:
            steps.append(_as_step(path, len(steps), _suffix(rank)))
        return steps

    def _record_path(self, number: int, rank: int) -> Path:
        return self.folder / f"step-{number:05d}{_suffix(rank)}.json"

    def _drop_unfinished(self) -> None:
        """Remove what no finished step names: records and shards of steps that were cut off, old states."""
        finished = self.all_steps()
        kept = {step.shard for steps in finished for step in steps}
        for path in self.partial.iterdir():
            if path.is_file() and path.name not in kept:
                path.unlink()
            elif path.is_dir() and path != self.folder:
                shutil.rmtree(path)
        needed = {steps[-1].state for steps in finished if steps}
        records = {self._record_path(step.number, rank).name for rank, steps in enumerate(finished) for step in steps}
        for path in (*self.folder.glob("state-*"), *self.folder.glob("step-*")):
            if path.name not in needed and path.name not in records:
                path.unlink()

    def load_state(self) -> dict[str, Tensor]:
        """The state that the last finished step left."""
        last = self.steps[-1]
        assert last.state is not None, "the last step left no state"
        path = self.folder / last.state
        try:
            if sha256_file(path) != last.state_sha256:
                raise OutputError(f"{path} has changed since it was written. Add --restart to begin anew.")
            return load_file(path, backend="pread")
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{path}: cannot be read ({error}). Add --restart to begin anew.") from None

    def finish_step(self, step: Step, state: Mapping[str, Tensor] | None) -> None:
        """Make a step durable. Its shard must be on disk already."""
        if state is not None:
            assert step.state is not None
            path = self.folder / step.state
            try:
                save_file(dict(state), path)
            except SafetensorError as error:  # how the library reports a full disk
                raise OutputError(f"{path}: writing failed ({error}).") from error
            _sync(path)
            step = replace(step, state_sha256=sha256_file(path))
        self._write(self._record_path(step.number, self.rank), asdict(step))
        self.steps.append(step)
        resumable = [one.state for one in self.steps if one.resumable]
        if step.resumable:
            for name in resumable[: -1 if self.size == 1 else -3]:
                if name is not None:
                    (self.folder / name).unlink(missing_ok=True)

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        draft = path.with_suffix(".draft")
        text = json.dumps(value, sort_keys=True)
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        draft.write_text(f'{{"sha256": "{sha256}", "record": {text}}}\n', encoding="utf-8")
        _sync(draft)
        sync_folder(self.partial)  # the name of the shard, before the record that counts on it
        draft.rename(path)
        sync_folder(self.folder)

    @property
    def _parked(self) -> Path:
        return parked(self.partial)

    def publish(self, out: Path) -> None:
        """Give the whole output its name, without the journal. Between the renames a run can still go on."""
        if self._parked.exists():
            shutil.rmtree(self._parked)
        self.folder.rename(self._parked)
        self.partial.rename(out)
        shutil.rmtree(self._parked)
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _lock(folder: Path) -> IO[str]:
    """The lock of a journal. Raises BlockingIOError when another process has it, or has just given the output its name
    and removed the journal with the file that was locked here."""
    path = folder / LOCK
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError
    except BaseException:
        file.close()
        raise
    return file


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sweep(out: Path, partial: Path) -> None:
    """Remove the parked journal of a run that was cut off after its output had its name, before it could clean up."""
    journal = parked(partial)
    if journal.is_dir() and not partial.exists() and out.is_dir() and any(out.iterdir()):
        try:
            lock = _lock(journal)
        except OSError:  # that run is at it itself, or has just done it
            return
        with lock:
            shutil.rmtree(journal)


def parked(partial: Path) -> Path:
    """Where the journal waits while the folder gets its name."""
    return partial.with_name(partial.name + ".journal")


def can_continue(partial: Path) -> bool:
    """Whether a folder was left by a run that can go on (or was only just made)."""
    return (partial / FOLDER).is_dir() or parked(partial).is_dir() or (partial.is_dir() and not any(partial.iterdir()))


def _read_record(path: Path) -> dict[str, Any]:
    """The record of a JSON file of the journal. Raises OutputError for anything that this module did not write."""
    try:
        value = load_json(path, MAX_RECORD_BYTES)
    except CheckpointError as error:
        raise OutputError(f"{error} Add --restart to begin anew.") from None
    record = value.get("record")
    text = json.dumps(record, sort_keys=True)
    if not isinstance(record, dict) or hashlib.sha256(text.encode()).hexdigest() != value.get("sha256"):
        raise OutputError(f"{path} is damaged. Add --restart to begin anew.")
    return record


def _suffix(rank: int) -> str:
    return f"-rank{rank}" if rank else ""


def _as_step(path: Path, number: int, suffix: str) -> Step:
    """A step as it was written: its files lie in their folders under the names that they always have."""
    record = _read_record(path)
    types = {"number": int, "shard": str, "sha256": str, "tensors": dict, "results": list, "kv": dict}
    states = (None, f"state-{number:05d}{suffix}.safetensors")
    if (
        record.keys() != Step.__dataclass_fields__.keys()
        or record["number"] != number
        or not all(type(record[key]) is kind for key, kind in types.items())  # -0.0 == 0 == False
        or Path(record["shard"]).name != record["shard"]
        or record["state"] not in states
        or not isinstance(record["resumable"], bool)
        or not all(isinstance(count, int) for count in record["tensors"].values())
        or not all(isinstance(row, dict) for row in record["results"])
    ):
        raise OutputError(f"{path} is damaged. Add --restart to begin anew.")
    return Step(**record)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The journal of a run: what is finished and durable, so that a run that was stopped goes on where it was.

It lives in `<out>.partial/.kvq-journal/` and is gone from the finished folder:

    fingerprint.json     what the run depends on; a run with any other value may not continue this one
    step-00004.json      step 4 is finished: its shard with its hash, its results, the state that step 5 starts from
    state-00004.safetensors

A step counts when its JSON file has its name, which it gets by a rename after everything that it names is on disk.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvq.checkpoint.index import load_json
from kvq.errors import OutputError

FOLDER = ".kvq-journal"
STATE_BYTES = 2 * 2**30
"""Hidden states to write for each layer, on average. Larger ones are kept every few layers; in between, a run that is
cut off computes those layers again, which costs less than a terabyte of writes."""


def keeps_state(number: int, nbytes: int) -> bool:
    """Whether the state after step `number` is kept."""
    return number % -(-nbytes // STATE_BYTES) == 0 if nbytes else True


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
    resumable: bool = True
    kv: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Journal:
    """Open for one process at a time: a lock is held until `close`."""

    partial: Path
    steps: list[Step] = field(default_factory=list)
    _lock: IO[str] | None = None

    @property
    def folder(self) -> Path:
        return self.partial / FOLDER

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Take the folder, new or left by a run with the same fingerprint; `steps` then holds what is finished.

        Raises OutputError when another run holds it, when it depends on something else, or has no journal.
        """
        if self.partial.exists() and not can_continue(self.partial):
            raise OutputError(f"{self.partial} is in the way and no run of kvq. Remove it, or choose another --out.")
        try:
            if self._parked.is_dir() and not self.folder.exists() and self.partial.exists():
                self._parked.rename(self.folder)  # cut off between the last two renames of `publish`
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise OutputError(f"{self.partial}: another run is writing there. Choose another --out.") from None
        except OSError as error:
            raise OutputError(f"{self.partial}: cannot be made ({error.strerror}). Choose another --out.") from None
        try:
            self._take(fingerprint)
        except BaseException:
            self.close()
            raise

    def _take(self, fingerprint: Mapping[str, Any]) -> None:
        path = self.folder / "fingerprint.json"
        if path.exists():
            self._compare(load_json(path), fingerprint)
            self.steps = self._read_steps()
        else:
            self._write(path, dict(fingerprint))
        self._drop_unfinished()

    def _compare(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for key in (*now, *(key for key in before if key not in now)):
            if before.get(key) != now.get(key):
                raise OutputError(
                    f"{self.partial} was left by a run with another {key} ({_short(before.get(key))}, now "
                    f"{_short(now.get(key))}). Run the same command as then to go on, or add --restart to discard it."
                )

    def _read_steps(self) -> list[Step]:
        steps: list[Step] = []
        while (path := self.folder / f"step-{len(steps):05d}.json").exists():
            try:
                steps.append(Step(**load_json(path)))
            except TypeError:
                raise OutputError(f"{path} is damaged. Add --restart to begin anew.") from None
        while steps and not steps[-1].resumable:
            (self.folder / f"step-{len(steps) - 1:05d}.json").unlink()
            steps.pop()
        return steps

    def _drop_unfinished(self) -> None:
        """Remove what no finished step names: the shard of a step that was cut off, old states."""
        kept = {step.shard for step in self.steps}
        for path in self.partial.iterdir():
            if path.is_file() and path.name not in kept:
                path.unlink()
            elif path.is_dir() and path != self.folder:
                shutil.rmtree(path)
        last = self.steps[-1].state if self.steps else None
        for path in self.folder.glob("state-*"):
            if path.name != last:
                path.unlink()

    def load_state(self) -> dict[str, Tensor]:
        """The state that the last finished step left."""
        name = self.steps[-1].state
        assert name is not None, "the last step left no state"
        try:
            return load_file(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{self.folder / name}: cannot be read ({error}). Add --restart to begin anew.") from None

    def finish_step(self, step: Step, state: Mapping[str, Tensor] | None) -> None:
        """Make a step durable. Its shard must be on disk already."""
        if state is not None:
            assert step.state is not None
            path = self.folder / step.state
            save_file(dict(state), path)
            _sync(path)
        values = {name: getattr(step, name) for name in Step.__dataclass_fields__}
        self._write(self.folder / f"step-{step.number:05d}.json", values)
        self.steps.append(step)
        if step.resumable:
            for path in self.folder.glob("state-*"):
                if path.name != step.state:
                    path.unlink()

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(value), encoding="utf-8")
        _sync(draft)
        draft.rename(path)
        sync_folder(self.partial)
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


def parked(partial: Path) -> Path:
    """Where the journal waits while the folder gets its name."""
    return partial.with_name(partial.name + ".journal")


def can_continue(partial: Path) -> bool:
    """Whether a folder was left by a run that can go on (or was only just made)."""
    return (partial / FOLDER).is_dir() or parked(partial).is_dir() or (partial.is_dir() and not any(partial.iterdir()))


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

"""CheckpointWriter: a new checkpoint folder, whole or not there at all.

Everything is written into `<out>.partial`; the folder gets its name by one rename, after the last byte is on disk.
The one writer of safetensors data.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvq.checkpoint.hashing import sha256_file
from kvq.checkpoint.index import INDEX_NAME, MANIFEST_NAME
from kvq.checkpoint.journal import Journal, Step, can_continue, sweep, sync_folder
from kvq.errors import KvqError, OutputError

SPARE_BYTES = 64 * 2**20  # manifest, index, file-system overhead


def dump_json(value: Any) -> str:
    """JSON text as kvq writes it: keys in their own order, a newline at the end. Raises ValueError for NaN."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def check_output(out: Path, needed_bytes: int) -> None:
    """Refuse, before anything is read, an output that exists already or a disk that cannot hold it.

    Clears what a run left that was cut off when its output was whole already.
    """
    if out.name in ("", ".."):
        raise OutputError(f"{out} is not the name of a new folder. Choose another --out.")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"{out} exists and is not a folder. Choose another --out.")
    sweep(out, partial_of(out))
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(
            f"{out} is not empty; kvq never overwrites a checkpoint. Choose another --out or remove it."
            + (f" A run has finished there: kvq verify {out}." if (out / MANIFEST_NAME).is_file() else "")
        )
    partial = partial_of(out)
    if partial.exists() and not can_continue(partial):
        _refuse_partial(partial)
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise OutputError(f"{parent} is a file, so {out} cannot be made below it. Choose another --out.")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable. Choose another --out.")
    free = shutil.disk_usage(parent).free
    if partial.exists():  # what an earlier run has written counts
        needed_bytes -= min(needed_bytes, bytes_of(path for path in partial.glob("*.safetensors")))
    if needed_bytes + SPARE_BYTES > free:
        raise OutputError(
            f"{parent}: the output needs {(needed_bytes + SPARE_BYTES) / 1e9:.2f} GB and {free / 1e9:.2f} GB are free. "
            "Make room or choose another --out."
        )


def check_outside(out: Path, source: Path) -> None:
    """Refuse an output that is the source or lies in it."""
    if out.resolve().is_relative_to(source.resolve()):
        raise OutputError(f"{out} lies inside the source {source}, which kvq never changes. Choose another --out.")


def partial_of(out: Path) -> Path:
    """Where an output grows until it is whole."""
    return out.with_name(out.name + ".partial")


def _refuse_partial(partial: Path) -> None:
    raise OutputError(
        f"{partial} is left from a run that did not finish and cannot be continued. Remove it, or choose another --out."
    )


class CheckpointWriter:
    """Collects shards and side files. Use as a context manager: an error leaves `<out>.partial`, never `<out>`.

    With a journal that has begun, shards of finished steps are taken over, and an error leaves a run to go on with.
    """

    def __init__(self, out: Path, journal: Journal | None = None) -> None:
        self.out = out
        self.partial = partial_of(out)
        self.journal = journal
        self.weight_map: dict[str, str] = {}
        self.total_size = 0
        self.sha256: dict[str, str] = {}
        self._whole = False

    def __enter__(self) -> Self:
        if self.journal is not None:
            try:
                for step in self.journal.steps:
                    self._take_over(step)
            except BaseException:
                self.journal.close()
                raise
            return self
        if self.partial.exists():
            _refuse_partial(self.partial)
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise OutputError(f"{self.partial}: cannot be made ({error.strerror}). Choose another --out.") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """An error says what is left behind."""
        left = f"Remove {self.partial} before the next run."
        if self.journal is not None:
            self.journal.close()
            left = f"What is finished is kept in {self.partial}: the same command goes on from there."
        if isinstance(value, OSError):
            raise OutputError(f"{self.partial}: writing failed ({value.strerror or value}). {left}") from value
        if isinstance(value, KvqError) and not self._whole:
            value.args = (f"{value} {left}",)

    def _take_over(self, step: Step) -> None:
        if not step.shard:
            return  # a rank that had nothing to write of a layer
        path = self.partial / step.shard
        if not path.is_file() or sha256_file(path) != step.sha256:
            raise OutputError(f"{path} has changed since it was written. Add --restart to begin anew.")
        self.note_step(step)

    def note_step(self, step: Step) -> None:
        """Remember a finished step's shard without reading it: its own rank wrote it in this run, or has checked it."""
        if step.shard:
            self.note_shard(step.shard, step.tensors)
            self.sha256[step.shard] = step.sha256

    def note_shard(self, shard: str, tensors: Mapping[str, int]) -> None:
        """Remember for the index what a shard holds: names and bytes."""
        self.weight_map.update(dict.fromkeys(tensors, shard))
        self.total_size += sum(tensors.values())

    def add_shard(self, shard: str, tensors: dict[str, Tensor]) -> None:
        """Write one shard and remember its names. Tensors may be on any device.

        `tensors` is emptied as soon as they are in the file, so that their memory is free while that is synced and
        hashed.
        """
        again = [name for name in tensors if name in self.weight_map]
        assert not again, f"written twice: {again[:3]}"
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        path = self.partial / shard
        try:
            save_file(on_host, path, metadata={"format": "pt"})
        except SafetensorError as error:  # how the library reports a full disk
            raise OutputError(f"{path}: writing failed ({error}).") from error
        path.chmod(0o666 & ~umask())  # the library makes files that only their owner can read
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in on_host.items()}
        tensors.clear()
        on_host.clear()
        self._sync(path)
        self.note_shard(shard, sizes)

    def copy_file(self, folder: Path, relative: Path, new_name: str | None = None) -> None:
        """Copy a file byte for byte, keeping its place below the folder (unless it gets a new name)."""
        target = self.partial / (new_name or relative)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(folder / relative, target)
        except OSError as error:  # of either disk
            raise OutputError(f"{folder / relative}: cannot be copied to {target} ({error.strerror}).") from error
        self._sync(target)

    def add_text(self, name: str, text: str) -> None:
        path = self.partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self._sync(path)

    def add_index(self) -> None:
        """Write the index from what was written."""
        index = {"metadata": {"total_size": self.total_size}, "weight_map": dict(sorted(self.weight_map.items()))}
        self.add_text(INDEX_NAME, dump_json(index))

    def publish(self) -> None:
        """Give the folder its name. The last step."""
        self._whole = True
        sync_folder(self.partial)
        if self.out.exists():
            try:
                self.out.rmdir()  # empty, as check_output saw
            except OSError:
                raise OutputError(
                    f"{self.out} appeared during the run. The checkpoint is whole in {self.partial}; "
                    f"remove {self.out} to let it have its name."
                ) from None
        if self.journal is not None:
            self.journal.publish(self.out)
        else:
            self.partial.rename(self.out)
        sync_folder(self.out.parent)

    def _sync(self, path: Path) -> None:
        """Put a file on disk and hash it, both at once: a disk and a processor are about equally fast at it."""
        with path.open("rb+") as file, ThreadPoolExecutor(1) as thread:
            digest = thread.submit(sha256_file, path)
            os.fsync(file.fileno())
            self.sha256[str(path.relative_to(self.partial))] = digest.result()


def umask() -> int:
    """The process's umask, which can only be read by setting it."""
    current = os.umask(0o077)
    os.umask(current)
    return current


def bytes_of(files: Iterable[Path]) -> int:
    """Sum of file sizes."""
    return sum(path.stat().st_size for path in files)

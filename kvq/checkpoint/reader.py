"""CheckpointReader: tensors by name, straight from the shards. The one reader of safetensors data."""

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvq.checkpoint.index import CheckpointIndex, expect_folder, load_config, load_index
from kvq.errors import CheckpointError

WEIGHT_FILE_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
READING_THREADS = 4  # one thread copies about 4 GB/s out of the page cache; disks want several requests at once
FP8_NAN_CODE = 0x7F  # e4m3fn has no infinity; sign aside, this one byte is NaN


TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class CheckpointReader:
    """A checkpoint folder: config, index, tensors. A tensor is read when asked for.

    Not by memory-mapping: a file that shrinks or a disk that fails would kill the process with a bus error.

    `read_ahead` starts to read tensors that will be asked for soon, into page-locked memory, so that reading goes on
    while a GPU computes.
    """

    def __init__(self, folder: Path) -> None:
        expect_folder(folder)
        self.folder = folder
        self.config: dict[str, Any] = load_config(folder)
        self.index: CheckpointIndex = load_index(folder)
        self._files: dict[str, Any] = {}
        self._ahead: dict[str, Future[Tensor]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def read_ahead(self, names: Iterable[str]) -> None:
        """Begin to read these tensors. Each is handed out once, by `tensor`, and then forgotten."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="read-ahead")
        for name in names:
            if name in self.index and name not in self._ahead and self.index[name].dtype in TORCH_DTYPES:
                self._ahead[name] = self._threads.submit(self._read_pinned, name)

    def _read_pinned(self, name: str) -> Tensor:
        info = self.index[name]
        buffer = torch.empty(info.nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        view, done = buffer.numpy().data, 0
        handle = os.open(self.folder / info.shard, os.O_RDONLY)
        try:
            while done < info.nbytes:
                count = os.preadv(handle, [view[done:]], info.offset + done)
                if count == 0:
                    raise OSError(f"the file ends {info.nbytes - done} bytes early")
                done += count
        finally:
            os.close(handle)
        return buffer.view(TORCH_DTYPES[info.dtype]).reshape(info.shape)

    def tensor(self, name: str, *, check: bool = True) -> Tensor:
        """The tensor as stored, on the CPU. Raises CheckpointError when it cannot be read, or holds NaN or Inf.

        Without `check` the caller looks for NaN itself, after it has moved the tensor to a faster device.
        """
        info = self.index[name]
        try:
            value = self._ahead.pop(name).result() if name in self._ahead else self._read(info.shard, name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / info.shard}: cannot read tensor {name} ({error}).") from None
        if check:
            check_finite(self.folder / info.shard, name, value)
        return value

    def _read(self, shard: str, name: str) -> Tensor:
        if shard not in self._files:
            self._files[shard] = safe_open(self.folder / shard, framework="pt", backend="pread")
        value: Tensor = self._files[shard].get_tensor(name)
        return value

    def release(self) -> None:
        """Close the files. Tensors already given out stay valid."""
        self._files.clear()

    def side_files(self) -> list[Path]:
        """Every file that is not weights: tokenizer, chat template, custom code, licence; relative to the folder.

        Symbolic links to files are followed (the Hub cache is made of them); hidden files and caches are left out.
        """
        files = []
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            hidden = any(part.startswith((".", "__pycache__")) for part in relative.parts)
            if not hidden and path.is_symlink() and not path.exists():
                raise CheckpointError(f"{path} is a link to nothing; the download is not complete. Download it again.")
            if path.is_file() and not hidden and not path.name.endswith(WEIGHT_FILE_SUFFIXES):
                files.append(relative)
        return files


def check_finite(place: Path, name: str, value: Tensor) -> None:
    """Raise CheckpointError if a floating-point tensor holds NaN or Inf."""
    if not value.is_floating_point() or value.numel() == 0:
        return
    if value.dtype == torch.float8_e4m3fn:
        finite = not bool(((value.view(torch.uint8) & 0x7F) == FP8_NAN_CODE).any())
    elif value.element_size() == 1:
        finite = bool(torch.isfinite(value.float()).all())
    else:
        finite = bool(torch.isfinite(value).all())
    if not finite:
        raise CheckpointError(f"{place}: tensor {name} holds NaN or Inf; the checkpoint is damaged. Download it again.")

"""Several processes at one job, as `torchrun` and `accelerate launch` start them. The door to torch.distributed.

Each rank owns a range of every layer's experts and a range of the calibration sequences. All ranks make the same calls
in the same order; none of them is rank 0's alone.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from kvq.errors import RankError, RecipeError, is_out_of_memory
from kvq.shares import launched, share

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # a rank may wait that long for another's reading or writing
ROLL_CALL = 3.0  # seconds in which ranks that saw an exchange fail say that they are alive


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all of a run. Alone, every exchange is with itself."""

    rank: int = 0
    size: int = 1
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"

    @property
    def first(self) -> bool:
        return self.rank == 0

    def own(self, count: int, rank: int | None = None) -> range:
        """A rank's part of things in a row."""
        return share(count, self.rank if rank is None else rank, self.size)

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in the order of the ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._together(lambda: dist.all_gather_object(found, value, group=_objects()))
        return found

    def total(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place; its order is the library's. Of float32: sums of BF16 would be BF16."""
        if self.size > 1:
            self._together(lambda: dist.all_reduce(value))
        return value

    def exchange(self, rows_RC: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows in the order of the ranks that they go to -> rows in the order of the ranks that they come from."""
        if self.size == 1:
            return rows_RC
        out_RC = torch.empty(sum(received), rows_RC.shape[1], dtype=rows_RC.dtype, device=rows_RC.device)
        self._together(lambda: dist.all_to_all_single(out_RC, rows_RC.contiguous(), list(received), list(sent)))
        return out_RC

    def _together(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            if is_out_of_memory(error):  # this rank's own trouble
                raise
            raise RankError(
                f"{self}: {self._absent()} ({_first_sentence(error)}); its own message says why. Start all ranks again "
                "with the same command: the run goes on from its last finished layer."
            ) from error

    def _absent(self) -> str:
        """Who does not answer. Ranks that are still computing do not, but those that wait for the lost one do."""
        missing = _roll_call(self.rank, self.size)
        if missing is None:
            place = os.environ.get("MASTER_ADDR", "rank 0's host")
            return f"no answer from the launcher on {place}, which ended with its ranks or without them"
        if not missing:
            return "another rank ended or does not answer"
        names = [f"{rank} on {self.hosts[rank]}" if self.hosts else str(rank) for rank in missing]
        return f"no answer from rank {', '.join(names)}"

    def greet(self, device: str) -> "Ranks":
        """Say on which host each rank is, and try every kind of exchange once: what cannot work fails at the start."""
        if self.size == 1:
            return self
        known = Ranks(self.rank, self.size, tuple(self.gather(socket.gethostname())))
        try:
            number = torch.full((self.size, 1), self.rank, dtype=torch.float32, device=device)
            ones = [1] * self.size
            numbers = known.exchange(number, ones, ones).flatten().tolist()
            total = known.total(torch.ones(1, device=device)).item()
        except RankError as error:
            raise RankError(f"{error} This was the first exchange{NCCL_ADVICE if 'cuda' in device else ''}.") from error
        if numbers != list(range(self.size)) or total != self.size:
            raise RankError(
                f"{self}: a first exchange on {device} gave {numbers} and {total}. The connection between the ranks "
                f"corrupts data{NCCL_ADVICE if 'cuda' in device else ''}."
            )
        return known

    def leave(self) -> None:
        """Wait until all are done, then part: a rank that fails at the very end ends the others too."""
        if self.size > 1:
            self.gather(None)
            dist.destroy_process_group()
            _groups.clear()


ALONE = Ranks()
NCCL_ADVICE = "; NCCL_DEBUG=WARN shows what NCCL met, and NCCL_NVLS_ENABLE=0 does without NVLink multicast"
_groups: dict[str, Any] = {}


def _objects() -> Any:
    """Python objects travel on the host, whatever tensors do."""
    if "objects" not in _groups:
        _groups["objects"] = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _groups["objects"]


def _roll_call(rank: int, size: int) -> list[int] | None:
    """Ranks that have not seen the failure that this rank has. None when the launcher, who keeps the list, is gone."""
    store, deadline = _groups.get("store"), time.monotonic() + ROLL_CALL
    if store is None:
        return []
    try:
        store.set(f"alive/{rank}", "")
        missing = list(range(size))
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            missing = [one for one in missing if not store.check([f"alive/{one}"])]
        return missing
    except RuntimeError:
        return None


def _first_sentence(error: RuntimeError) -> str:
    """What the library says, without the line of its source."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()) or type(error).__name__
    return text.splitlines()[0].split(". ")[0][:200]


def join(device: str) -> tuple[Ranks, str]:
    """This process's place, by the environment that the launcher made, and its device.

    `auto` and `cuda` become the GPU of this process's number on its host. Raises RecipeError for a single device of
    many ranks, RankError when the others cannot be reached.
    """
    rank, size = launched()
    if size == 1:
        return Ranks(), device
    if ":" in device:
        raise RecipeError(f"--device {device}: of {size} ranks each takes the GPU of its own number; give cuda or cpu.")
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    ranks = Ranks(rank, size)
    if on_gpu:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise RecipeError(f"rank {ranks.rank} needs GPU {local}, and there are {torch.cuda.device_count()} here.")
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    ranks._together(lambda: _connect("cuda:nccl,cpu:gloo" if on_gpu else "gloo"))
    device = device if on_gpu else "cpu"
    return ranks.greet(device), device


def _connect(backend: str) -> None:
    store, rank, size = next(iter(rendezvous("env://", timeout=PATIENCE)))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    _groups["store"] = store

"""Several processes at one job, as `torchrun` and `accelerate launch` start them. The door to torch.distributed.

Each rank owns a range of every layer's experts and a range of the calibration sequences. All ranks make the same calls
in the same order; none of them is rank 0's alone.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from kvq.errors import RankError, RecipeError
from kvq.shares import share

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # a rank may wait that long for another's reading or writing


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all of a run. Alone, every exchange is with itself."""

    rank: int = 0
    size: int = 1

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
        """Sum over all ranks, in place; its order is the library's."""
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
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise RankError(
                f"rank {self.rank} of {self.size}: another rank ended or does not answer ({reason}); its own message "
                "says why. Start all ranks again with the same command: the run goes on from its last finished layer."
            ) from error

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
            _groups.clear()


ALONE = Ranks()
_groups: dict[str, Any] = {}


def _objects() -> Any:
    """Python objects travel on the host, whatever tensors do."""
    if "objects" not in _groups:
        _groups["objects"] = dist.new_group(backend="gloo", timeout=PATIENCE)
    return _groups["objects"]


def join(device: str) -> tuple[Ranks, str]:
    """This process's place, by the environment that the launcher made, and its device.

    `auto` and `cuda` become the GPU of this process's number on its host. Raises RecipeError for a single device of
    many ranks, RankError when the others cannot be reached.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks(), device
    if ":" in device:
        raise RecipeError(f"--device {device}: of {size} ranks each takes the GPU of its own number; give cuda or cpu.")
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    ranks = Ranks(int(os.environ["RANK"]), size)
    if on_gpu:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise RecipeError(f"rank {ranks.rank} needs GPU {local}, and there are {torch.cuda.device_count()} here.")
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    backend = "cuda:nccl,cpu:gloo" if on_gpu else "gloo"
    ranks._together(lambda: dist.init_process_group(backend, timeout=PATIENCE))
    return ranks, device if on_gpu else "cpu"

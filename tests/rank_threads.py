"""Ranks of one run as threads of this process, one of which works at a time: what they exchange, without processes.

Shape suffixes: R = rows, C = columns.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvq.ranks import Ranks

T = TypeVar("T")
PATIENCE = 60  # seconds that a rank waits for the others: longer than any of them computes here


class OutOfStepError(AssertionError):
    """Ranks that should make the same calls did not."""


class Meeting:
    """Where all ranks put a value, wait for the others' and take all. The turn to work goes on while one waits."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=PATIENCE)

    def swap(self, rank: int, kind: str, value: Any) -> list[Any]:
        self._values[rank] = (kind, value)
        self._turn.release()
        try:
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
        finally:
            self._turn.acquire()
        kinds = [one for one, _ in found]
        if len(set(kinds)) > 1:
            raise OutOfStepError(f"ranks are not in step: {kinds}")
        return [one for _, one in found]

    def work(self, job: Callable[[], T]) -> T:
        """A rank's whole work. When it fails, those who wait for it fail too."""
        with self._turn:
            try:
                return job()
            except BaseException:
                self._barrier.abort()
                raise


@dataclass(frozen=True, slots=True)
class ThreadRanks(Ranks):
    """One of them. Sums are taken in the order of the ranks."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def gather(self, value: T) -> list[T]:
        return self.meeting.swap(self.rank, "gather", value)

    def total(self, value: Tensor) -> Tensor:
        parts = self.meeting.swap(self.rank, "total", value.clone())
        return value.copy_(torch.stack(parts).sum(dim=0))

    def exchange(self, rows_RC: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert rows_RC.shape[0] == sum(sent)
        parcels = self.meeting.swap(self.rank, "exchange", torch.split(rows_RC, list(sent)))
        mine = [parcel[self.rank] for parcel in parcels]
        if [part.shape[0] for part in mine] != list(received):
            raise OutOfStepError(f"{[part.shape[0] for part in mine]} rows came, {list(received)} were expected")
        return torch.cat(mine)


def run_ranks(size: int, job: Callable[[Ranks], T]) -> list[T]:
    """What the job gives on each of `size` ranks. Raises the first error that is no mere consequence of another's."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        futures = [
            threads.submit(meeting.work, lambda rank=rank: job(ThreadRanks(rank, size, meeting=meeting)))
            for rank in range(size)
        ]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]

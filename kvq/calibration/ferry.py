"""Hidden states between a page-locked buffer and a GPU, on streams of their own: copies run beside the GPU's work.

Two batches of device memory for each direction, whatever the number of batches: a program that is far ahead of its GPU
would otherwise hold a copy of every batch. What `fetch` gives is valid until `fetch` is called again.

Shape suffixes: N = sequences, B = sequences of a batch, S = tokens per sequence, H = hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DEPTH = 2


@dataclass(slots=True, eq=False)
class _Slot:
    """Device memory of a batch, and when it may be used again."""

    value_BSH: Tensor
    free: torch.cuda.Event


# What torch gives no types for.
_new_event: Any = torch.cuda.Event
_new_stream: Any = torch.cuda.Stream


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """When everything that the stream has been given so far is done."""
    event: torch.cuda.Event = _new_event()
    event.record(stream)
    return event


class Ferry:
    """For one buffer and one device. The buffer belongs to it until `torch.cuda.synchronize` was called."""

    def __init__(self, hidden_NSH: Tensor, batch_size: int, device: torch.device) -> None:
        self._hidden_NSH, self._batch_size = hidden_NSH, batch_size
        self._device = device
        self._incoming, self._outgoing = (_new_stream(device) for _ in range(2))
        shape = (min(batch_size, hidden_NSH.shape[0]), *hidden_NSH.shape[1:])
        values = [torch.empty(shape, dtype=hidden_NSH.dtype, device=device) for _ in range(2 * DEPTH)]
        # The memory came from the current stream and may still be in use there by whoever had it before.
        slots = [_Slot(value_BSH, _event(torch.cuda.current_stream(device))) for value_BSH in values]
        self._in, self._out = slots[:DEPTH], slots[DEPTH:]
        self._lent: _Slot | None = None
        self._ahead: dict[tuple[int, int], tuple[_Slot, torch.cuda.Event]] = {}
        self._written: dict[tuple[int, int], torch.cuda.Event] = {}

    def fetch(self, batch: slice) -> Tensor:
        """The batch on the device; then begins to copy the one after it."""
        here = torch.cuda.current_stream(self._device)
        if self._lent is not None:
            self._lent.free = _event(here)
            self._in.append(self._lent)
        found = self._ahead.pop((batch.start, batch.stop), None)
        self._forget()
        slot, arrived = found or self._begin(batch)
        here.wait_event(arrived)
        self._lent = slot
        following = slice(batch.stop, min(batch.stop + self._batch_size, self._hidden_NSH.shape[0]))
        if following.start < following.stop:
            self._ahead[following.start, following.stop] = self._begin(following)
        return slot.value_BSH[: batch.stop - batch.start]

    def _forget(self) -> None:
        """Batches that were begun and are not what was asked for."""
        for slot, arrived in self._ahead.values():
            slot.free = arrived
            self._in.append(slot)
        self._ahead.clear()

    def _begin(self, batch: slice) -> tuple[_Slot, torch.cuda.Event]:
        slot = self._in.pop(0)
        self._incoming.wait_event(slot.free)
        for (start, stop), written in self._written.items():
            if start < batch.stop and batch.start < stop:
                self._incoming.wait_event(written)
        with torch.cuda.stream(self._incoming):
            slot.value_BSH[: batch.stop - batch.start].copy_(self._hidden_NSH[batch], non_blocking=True)
        return slot, _event(self._incoming)

    def store(self, batch: slice, hidden_BSH: Tensor) -> None:
        """Begins to copy the batch to the buffer; `hidden_BSH` may be changed afterwards."""
        for (start, stop), (slot, arrived) in list(self._ahead.items()):
            if start < batch.stop and batch.start < stop:  # it would be what was there before
                del self._ahead[start, stop]
                slot.free = arrived
                self._in.append(slot)
                self._outgoing.wait_event(arrived)
        slot = self._out.pop(0)
        here = torch.cuda.current_stream(hidden_BSH.device)
        here.wait_event(slot.free)
        staged_BSH = slot.value_BSH[: batch.stop - batch.start]
        staged_BSH.copy_(hidden_BSH)
        self._outgoing.wait_stream(here)
        with torch.cuda.stream(self._outgoing):
            self._hidden_NSH[batch].copy_(staged_BSH, non_blocking=True)
        self._written[batch.start, batch.stop] = slot.free = _event(self._outgoing)
        self._out.append(slot)

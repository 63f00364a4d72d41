"""Hidden states between layers: one buffer on the host, whatever the number of layers.

Shape suffixes: N = sequences, S = tokens per sequence, H = hidden size.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvq.calibration.ferry import Ferry


def page_locked(value: Tensor) -> Tensor:
    """The same host tensor, registered with the CUDA driver, so that copies to a GPU need no detour.

    Not `pin_memory`: PyTorch's allocator rounds up to a power of two, which for 13 GB are 4 GB more.
    """
    driver: Any = torch.cuda.cudart  # has no types
    cudart = driver()
    address = value.data_ptr()
    torch.cuda.check_error(cudart.cudaHostRegister(address, value.numel() * value.element_size(), 0))
    weakref.finalize(value, cudart.cudaHostUnregister, address).atexit = False
    return value


class ActivationStore:
    """The input of the next layer for every sequence. Batches are moved to the device that computes.

    On a machine with a GPU the buffer is page-locked and copies run beside the GPU's work (`ferry.py`); `hidden_NSH`
    waits for them.
    """

    def __init__(self, hidden_NSH: Tensor, batch_size: int) -> None:
        self._hidden_NSH = hidden_NSH
        self._ferry: Ferry | None = None
        self.batch_size = batch_size
        self._topk_NSK: Tensor | None = None

    @property
    def hidden_NSH(self) -> Tensor:
        """The buffer, as the host may read and change it."""
        self.land()
        return self._hidden_NSH

    def land(self) -> None:
        """Wait for copies under way, and give back the device memory that they need. To be called after a pass over the
        batches: an evaluation has a store for each length of its documents."""
        if self._ferry is not None:
            torch.cuda.synchronize()
            self._ferry = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sequences, tokens of one, hidden size."""
        sequences, length, hidden = self._hidden_NSH.shape
        return sequences, length, hidden

    def batches(self) -> Iterator[slice]:
        for start in range(0, self.shape[0], self.batch_size):
            yield slice(start, min(start + self.batch_size, self.shape[0]))

    def read(self, batch: slice, device: torch.device) -> Tensor:
        """A batch on the device. On a GPU it is valid until the next one is read."""
        if device.type == "cpu":
            return self.hidden_NSH[batch]
        return self._ferry_to(device).fetch(batch)

    def write(self, batch: slice, hidden_BSH: Tensor) -> None:
        if hidden_BSH.is_cuda:
            self._ferry_to(hidden_BSH.device).store(batch, hidden_BSH)
        else:
            self.hidden_NSH[batch] = hidden_BSH

    def _ferry_to(self, device: torch.device) -> Ferry:
        if self._ferry is None:
            self._ferry = Ferry(self._hidden_NSH, self.batch_size, device)
        return self._ferry

    def write_topk(self, batch: slice, topk_BSK: Tensor) -> None:
        """Keep what a sparse-attention indexer selected, for layers that share it.

        Nothing is kept when every position is selected: any order of all positions means the same.
        """
        if topk_BSK.shape[2] >= self.shape[1]:
            return
        if self._topk_NSK is None:
            shape = (*self.shape[:2], topk_BSK.shape[2])
            self._topk_NSK = torch.empty(shape, dtype=torch.int32, device=self._hidden_NSH.device)
        self._topk_NSK[batch] = topk_BSK.to(self._topk_NSK.device)

    def read_topk(self, batch: slice, device: torch.device, index_topk: int) -> Tensor:
        """The last full layer's selection for a batch: [B, S, K]."""
        length = self.shape[1]
        if self._topk_NSK is not None:
            return self._topk_NSK[batch].to(device)
        everything = torch.arange(min(length, index_topk), dtype=torch.int32, device=device)
        return everything.expand(batch.stop - batch.start, length, -1)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next layer depends on, to be kept and restored."""
        values = {"hidden_NSH": self.hidden_NSH}
        return values if self._topk_NSK is None else {**values, "topk_NSK": self._topk_NSK}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a state that was kept."""
        hidden = state["hidden_NSH"]
        assert hidden.shape == self.hidden_NSH.shape and hidden.dtype == self.hidden_NSH.dtype, "another run's state"
        self.hidden_NSH.copy_(hidden)
        self._topk_NSK = state.get("topk_NSK")

    def copy(self) -> "ActivationStore":
        """A store of its own with the same content."""
        other = ActivationStore(self.hidden_NSH.clone(), self.batch_size)
        other._topk_NSK = None if self._topk_NSK is None else self._topk_NSK.clone()
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(
            value.numel() * value.element_size() for value in (self._hidden_NSH, self._topk_NSK) if value is not None
        )

    @property
    def num_tokens(self) -> int:
        return self.shape[0] * self.shape[1]

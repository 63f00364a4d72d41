"""The next experts' weights, loaded while a GPU solves the ones before them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor


class LoadingAhead:
    """Loads on a thread and a stream of its own, one thing after the other. On a CPU nothing is begun before it is
    asked for: there it would only compete with the solver.

    Nothing is loaded before the GPU has reached the point at which the one before it was begun: a program that never
    waits for its GPU would otherwise fill it with weights.

    Use as a context manager: leaving it waits for what was begun.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="loading-ahead")
            new_stream: Any = torch.cuda.Stream  # has no types
            self._stream: torch.cuda.Stream = new_stream(device)
        self._begun: Any = None  # on the GPU's way, where the last load was begun

    def begin(self, load: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What is returned gives the tensor, or raises what loading it raised; to be called once."""
        if self._thread is None:
            return load
        before, self._begun = self._begun, torch.cuda.current_stream(self._device).record_event()
        loaded = self._thread.submit(self._load, load, before)

        def take() -> Tensor:
            value = loaded.result()
            value.record_stream(torch.cuda.current_stream(self._device))
            return value

        return take

    def _load(self, load: Callable[[], Tensor], reached: Any) -> Tensor:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if reached is not None:
                reached.synchronize()
            value = load()
            self._stream.synchronize()
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

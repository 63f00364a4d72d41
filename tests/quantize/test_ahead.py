"""When weights are loaded, with a GPU that only says how far it has come. On a real one: tests/test_gpu.py."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq.quantize.ahead import LoadingAhead


class Gpu:
    """Its one stream is at a point of the program; an event lies at the point at which it was recorded."""

    def __init__(self) -> None:
        self.enqueued, self._reached, self._moved = 0, 0, threading.Condition()

    def record_event(self) -> Any:
        at = self.enqueued
        return SimpleNamespace(synchronize=lambda: self._wait(at))

    def reach(self, point: int) -> None:
        with self._moved:
            self._reached = point
            self._moved.notify_all()

    def _wait(self, point: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: self._reached >= point, timeout=20)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return gpu


def load_of(number: int, loaded: dict[int, threading.Event]) -> Callable[[], Tensor]:
    loaded[number] = threading.Event()

    def load() -> Any:
        loaded[number].set()
        return SimpleNamespace(number=number, record_stream=lambda stream: None)

    return load


def test_nothing_is_loaded_before_the_gpu_is_where_the_one_before_was_begun(gpu: Gpu) -> None:
    loaded: dict[int, threading.Event] = {}
    with LoadingAhead(torch.device("cuda")) as ahead:
        takes: list[Any] = [ahead.begin(load_of(0, loaded))]
        for chunk in range(1, 4):  # the program is ahead of its GPU by all of its chunks
            takes.append(ahead.begin(load_of(chunk, loaded)))
            gpu.enqueued = chunk
        assert loaded[0].wait(20) and loaded[1].wait(20) and loaded[2].wait(20)
        assert not loaded[3].wait(0.2)  # the one before it was begun when a chunk had been enqueued
        gpu.reach(1)
        assert loaded[3].wait(20)
        assert [take().number for take in takes] == [0, 1, 2, 3]


def test_a_cpu_loads_when_it_is_asked_for() -> None:
    loaded: dict[int, threading.Event] = {}
    with LoadingAhead(torch.device("cpu")) as ahead:
        take = ahead.begin(load_of(0, loaded))
        assert not loaded[0].is_set()
        take()
        assert loaded[0].is_set()


def test_what_loading_raises_comes_when_it_is_asked_for(gpu: Gpu) -> None:
    def fails() -> Tensor:
        raise OSError("no such shard")

    with LoadingAhead(torch.device("cuda")) as ahead:
        take = ahead.begin(fails)
        with pytest.raises(OSError, match="no such shard"):
            take()

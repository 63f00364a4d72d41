"""What a GPU did during a stretch of a program: busy and idle time by stage, and the kernels that took longest.

From the events that CUDA itself records, so launch gaps and copies are seen as they were. Recording costs the host some
time: take durations from a run without it.
"""

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch

LONGEST = 28
NAME_LENGTH = 100


class GpuProfile:
    """Use `stage` to name what begins now; `stop` gives the report."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.__enter__()
        self._stages: list[tuple[int, str]] = []

    def stage(self, name: str) -> None:
        self._stages.append((time.time_ns(), name))

    def stop(self) -> list[str]:
        torch.cuda.synchronize()
        ended = time.time_ns()
        self._profiler.__exit__(None, None, None)
        kineto: Any = self._profiler.profiler
        events = [
            (event.start_ns(), event.duration_ns(), event.name())
            for event in kineto.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
        ]
        return [*self._by_stage(sorted(events), ended), *_by_kernel(events)]

    def _by_stage(self, events: list[tuple[int, int, str]], ended: int) -> list[str]:
        """Seconds of each stage, and how long at least one kernel or copy ran in it."""
        starts = [*self._stages, (ended, "")]
        busy, lengths, counts = defaultdict(int), defaultdict(int), defaultdict(int)
        for (begin, name), (end, _) in pairwise(starts):
            lengths[name] += end - begin
            reached = begin
            for start, duration, _ in events:
                if start + duration <= reached or start >= end:
                    continue
                counts[name] += 1
                busy[name] += max(0, min(start + duration, end) - max(start, reached))
                reached = max(reached, start + duration)
        return [
            f"{name}: {length / 1e9:.2f} s, GPU busy {busy[name] / 1e9:.2f} s, {counts[name]} kernels and copies"
            for name, length in lengths.items()
        ]


def _by_kernel(events: list[tuple[int, int, str]]) -> list[str]:
    total, count = defaultdict(int), defaultdict(int)
    for _, duration, name in events:
        total[name] += duration
        count[name] += 1
    longest = sorted(total, key=lambda name: -total[name])[:LONGEST]
    return [f"{total[name] / 1e6:9.1f} ms {count[name]:7}  {name[:NAME_LENGTH]}" for name in longest]

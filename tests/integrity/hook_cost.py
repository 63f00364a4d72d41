"""What the hooks cost the scheduler's thread in a decode step, without a GPU: `python -m tests.integrity.hook_cost`.

The Triton kernels are replaced by counters, the event by one that is always done; the Python around them is the real
one. So what is printed lacks Triton's own time for a launch, and adds nothing of a GPU's.
"""

import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvq.integrity import hooks
from kvq.integrity.guard import Guard
from kvq.integrity.table import VERDICT_FIELDS, PageTags, Writes
from tests.integrity.stub_scheduler import batch, make_guard, request

STEPS = 2000


class CountedTags(PageTags):
    """One launch each, as in `TritonPageTags`; the table stays as it is."""

    launches = 0

    def grow(self, rows_B: Tensor, old_lens_B: Tensor, new_lens_B: Tensor | None, max_new_pages: int) -> None:
        self.take_serials(rows_B.shape[0] * max_new_pages)
        self.launches += 1

    def check(self, rows_B: Tensor, max_pages: int, *, writes: Writes | None) -> Tensor:
        self.launches += 1
        return torch.zeros((rows_B.shape[0] + 1, VERDICT_FIELDS), dtype=torch.int32)


def stub_gpu(guard: Guard) -> CountedTags:
    """The guard takes the ways that it takes on a GPU."""
    event = SimpleNamespace(synchronize=lambda: None)
    setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))  # noqa: B010 - mypy
    guard.tags.__class__ = CountedTags
    guard.on_gpu = True
    assert isinstance(guard.tags, CountedTags)
    return guard.tags


def step(running: Any) -> None:
    """Every hook that a decode step calls, in the order of the overlapped loop."""
    hooks.before_next_batch(None)
    hooks.after_alloc_for_decode(None, running, 1)
    hooks.before_run_batch(None, running)
    hooks.before_process_batch_result(None, running, None)
    hooks.before_stream_output(None, running.reqs, False, None)


def measure(page_size: int, requests: int) -> tuple[float, float, float]:
    """Microseconds in a step (median, 99th percentile) and kernels launched."""
    guard = make_guard(page_size)
    running = batch(*(request(guard, row, 1) for row in range(requests)))
    tags = stub_gpu(guard)
    hooks.attach(guard)
    # At 64 the requests are spread over a page, so that one of them needs a new page in every step but for few.
    running.seq_lens_cpu = torch.arange(requests) * 37 + 1
    running.seq_lens = running.seq_lens_cpu.clone()
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        step(running)
        times.append(1e6 * (time.perf_counter() - started))
        running.seq_lens_cpu += 1
    hooks.attach(None)
    return statistics.median(times), statistics.quantiles(times, n=100)[-1], tags.launches / STEPS


def main() -> None:
    sys.stdout.write(
        "| page size | requests | us a step, median | 99th percentile | kernels a step |\n|---|---|---|---|---|\n"
    )
    for page_size in (1, 64):
        for requests in (1, 8, 64):
            median, high, launches = measure(page_size, requests)
            sys.stdout.write(f"| {page_size} | {requests} | {median:.0f} | {high:.0f} | {launches:.2f} |\n")


if __name__ == "__main__":
    main()

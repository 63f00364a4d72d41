"""Where finished layers are written while the next one is computed: one thread, one job at a time, in order."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self


class WritingDesk:
    """Use as a context manager: leaving it waits for the last job, whose error, if it is the first one, is raised.

    Without `behind` jobs are done at once, by the caller.
    """

    def __init__(self, *, behind: bool) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writing") if behind else None
        self._job: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def submit(self, job: Callable[[], None]) -> None:
        """Waits for the job before: what is written next holds memory. Raises what that job raised."""
        self.settle()
        if self._thread is None:
            job()
        else:
            self._job = self._thread.submit(job)

    def settle(self) -> None:
        """Wait until everything submitted is done. Raises what the job raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if value is None:
                self.settle()
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=True)

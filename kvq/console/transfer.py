"""Files on their way to or from the Hub, as a person sees them."""

import time
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from kvq.console.screen import ERR, OUT, clock, short_size, size


class TransferLines:
    """A line for each file with what is left, and one for each thing worth knowing; nothing when quiet."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._started = time.monotonic()
        self._tenth = 0

    def note(self, text: str) -> None:
        if not self._quiet:
            ERR.print(text)

    def checked(self, done_bytes: int, total_bytes: int) -> None:
        """What arrived, as it is hashed: a line for each tenth."""
        tenth = 10 * done_bytes // max(1, total_bytes)
        if tenth > self._tenth:
            self._tenth = tenth
            self.note(f"checked {short_size(done_bytes)} of {short_size(total_bytes)}")

    def sent(self, file: str, done_bytes: int, total_bytes: int) -> None:
        elapsed = time.monotonic() - self._started
        left = elapsed * (total_bytes - done_bytes) / done_bytes if done_bytes else 0.0
        rate = f"{short_size(done_bytes / elapsed)}/s" if elapsed else "at once"
        self.note(
            f"{file} sent: {short_size(done_bytes)} of {short_size(total_bytes)}, {rate}, about {clock(left)} left"
        )


def show_planned_upload(planned: Mapping[str, Any]) -> None:
    """What an upload would do; the files that it would send go to stdout."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_row("repository", planned["repo"])
    if planned["make"]:
        table.add_row("would make", f"the {planned['make']}, which is not there")
    table.add_row("files", f"{planned['num_files']}, {size(planned['num_bytes'])}")
    table.add_row("would send", f"{len(planned['send'])}, {size(planned['send_bytes'])}")
    if planned["remove"]:
        table.add_row("would remove", ", ".join(planned["remove"]))
    for reason in planned["unverified"]:
        table.add_row("unverified", f"{reason}; the card would say so")
    ERR.print(table)
    ERR.print("Nothing was sent.")
    for path in planned["send"]:
        OUT.print(path)


def show_upload(result: Mapping[str, Any]) -> None:
    """The closing words of an upload."""
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_row("repository", result["repo"])
    table.add_row("revision", result["revision"])
    table.add_row("files", f"{result['num_files']}, {size(result['num_bytes'])}: size and hash of each compared")
    table.add_row("sent now", f"{result['sent_files']}, {size(result['sent_bytes'])}")
    for reason in result["unverified"]:
        table.add_row("unverified", f"{reason}; the card says so")
    ERR.print(table)
    OUT.print(result["revision"])

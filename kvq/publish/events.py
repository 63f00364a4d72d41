"""The event log of a run: JSON lines that a machine follows. docs/events.md describes every line.

A line is on disk before the run goes on, so a run that is killed leaves a log that says how far it came; the run that
goes on appends to the same file.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from kvq import __version__
from kvq.checkpoint.source import Source
from kvq.errors import INTERRUPTED, OutputError, StoppedError, exit_code_of
from kvq.recipes.plan import QuantPlan
from kvq.stop import Terminated

VERSION = 1
LAST_LINE_BYTES = 1 << 20
LINE_START = b'{"version": '


def _starts_a_line(text: bytes) -> bool:
    return text.startswith(LINE_START[: len(text)])


class Progress(Protocol):
    """What a run tells while it goes on. Layers count from 0; `layer` is None for what lies outside of them."""

    def stage(self, layer: int | None, num_layers: int, text: str) -> None: ...

    def layer_done(self, layer: int, num_layers: int) -> None: ...


class EventLog:
    """Appends to a file. Without one it takes events and keeps none, so that callers need not ask.

    Raises OutputError, naming the file, when it cannot be written or holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file = -1
        self._next = 0
        self._started = datetime.now(UTC)
        if path is not None:
            try:
                self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._next = self._mend()
            except OSError as error:
                raise self._refusal(error) from None

    def _refusal(self, error: OSError) -> OutputError:
        return OutputError(f"--events {self.path}: cannot be written ({error.strerror}). Choose another file.")

    def _mend(self) -> int:
        """Cut off a line that a kill left unfinished; gives the number of the next event.

        Nothing is cut before the file's start, its last whole line and the rest after it are known to be of a log.
        """
        size = os.fstat(self._file).st_size
        start = max(0, size - LAST_LINE_BYTES)
        tail = os.pread(self._file, size - start, start)
        whole = tail.rfind(b"\n") + 1
        rest = tail[whole:]
        first = os.pread(self._file, min(size, len(LINE_START)), 0)
        if not _starts_a_line(first) or not _starts_a_line(rest):
            self._refuse_content()
        lines = tail[:whole].splitlines()
        if start and not lines:
            self._refuse_content()
        try:
            following = int(json.loads(lines[-1])["sequence"]) + 1 if lines else 0
        except (ValueError, KeyError, TypeError):
            self._refuse_content()
        if rest:
            os.ftruncate(self._file, start + whole)
        return following

    def _refuse_content(self) -> NoReturn:
        self.close()
        raise OutputError(f"--events {self.path}: exists and is no event log. Choose another file or remove it.")

    def emit(self, event: str, **fields: Any) -> None:
        """One line, on disk when this returns."""
        if self._file < 0:
            return
        now = datetime.now(UTC)
        row = {
            "version": VERSION,
            "sequence": self._next,
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "seconds": round((now - self._started).total_seconds(), 3),
            "event": event,
            **fields,
        }
        try:
            os.write(self._file, json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            os.fsync(self._file)
        except OSError as error:
            raise self._refusal(error) from None
        self._next += 1

    def beside(self, progress: Progress) -> Progress:
        """A progress that tells both this log and another."""
        return _Both(self, progress)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Both:
    """Stages and layers as events, and as whatever the other makes of them."""

    def __init__(self, log: EventLog, other: Progress) -> None:
        self._log = log
        self._other = other

    def stage(self, layer: int | None, num_layers: int, text: str) -> None:
        self._other.stage(layer, num_layers, text)
        self._log.emit("stage", layer=layer, num_layers=num_layers, stage=text)

    def layer_done(self, layer: int, num_layers: int) -> None:
        self._other.layer_done(layer, num_layers)
        self._log.emit("layer_finished", layer=layer, num_layers=num_layers)


def planned_event(source: Source, plan: QuantPlan, out: Path) -> dict[str, Any]:
    """The fields of `planned`: what the run will do, known before any weight is read."""
    return {
        "source": source.id,
        "revision": source.revision,
        "model_type": plan.facts.arch.model_type,
        "recipe": plan.recipe.name,
        "recipe_sha256": plan.recipe.sha256,
        "out": str(out),
        "num_quantized_modules": plan.num_modules,
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "warnings": list(plan.warnings),
    }


@contextmanager
def open_events(path: Path | None, command: str) -> Iterator[EventLog]:
    """A log that begins with `run_started` and ends, however the run ends, with what became of it."""
    log = EventLog(path)
    try:
        log.emit("run_started", command=command, kvq_version=__version__, pid=os.getpid())
        yield log
    except (StoppedError, Terminated) as stop:
        error = stop.as_error() if isinstance(stop, Terminated) else stop
        name = signal.Signals(error.exit_code - 128).name
        log.emit("run_stopped", exit_code=error.exit_code, signal=name, message=str(error))
        raise
    except KeyboardInterrupt:
        log.emit("run_stopped", exit_code=INTERRUPTED, signal="SIGINT", message="interrupted at once")
        raise
    except Exception as error:
        log.emit("run_failed", exit_code=exit_code_of(error), error=type(error).__name__, message=str(error))
        raise
    finally:
        log.close()

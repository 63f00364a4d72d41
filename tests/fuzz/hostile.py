"""What a stranger may write into a file, and a guard that sees what reading it touches."""

import copy
import json
import mmap
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

SECRET = "outside"  # a folder beside those that a target may touch
NAMES = (
    f"../{SECRET}/secret", f"../{SECRET}/x.safetensors", "/etc/passwd", "/dev/zero", "..", ".", "", "a/b", "a\0b",
    "\ud800", "x" * 300, "model.safetensors", "\x1b[31m\n", "\u202e", "kvq-manifest.json",
    "re:(", "re:(a+)+$", "re:a{999999999}", "re:((a{99}){99}){99}",
    "re:(?R)", "\u00e4", "a", "0", "-1", "[]", "null", "fp8", "gptq",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 64, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, 1e-320, True, False, None)
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 2000, '{"a":' * 1500, '"\\ud800"', "", "nul", "'a'")
CPU_SECONDS, SECONDS = 20, 600
ACTIONS = ("put", "put", "put", "drop", "rename", "twice", "add")
Edit = tuple[int, str, Any]


class Raw(str):
    """A piece of text that stands in a document as it is."""


def value(draw: Random, depth: int = 2) -> Any:
    """Something that JSON can hold, or nearly."""
    kind = draw.randrange(9 if depth else 6)
    if kind < 3:
        return draw.choice(NAMES)
    if kind < 5:
        return draw.choice(NUMBERS)
    if kind == 5:
        return Raw(draw.choice(RAW)) if draw.randrange(4) == 0 else draw.randrange(-(2**70), 2**70)
    if kind == 6:
        return "".join(chr(draw.randrange(0xD800)) for _ in range(draw.randrange(6)))
    if kind == 7:
        return [value(draw, depth - 1) for _ in range(draw.randrange(5))]
    return {draw.choice(NAMES): value(draw, depth - 1) for _ in range(draw.randrange(4))}


def edits(draw: Random) -> list[Edit]:
    """What is done at which place: a value put there, the place left out, its name changed or written twice."""
    return [(draw.randrange(5000), draw.choice(ACTIONS), value(draw)) for _ in range(draw.randint(1, 4))]


def spoiled(draw: Random, data: bytes) -> bytes:
    """The data with bytes overwritten, or cut off."""
    result = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(result) + 1)
        piece = bytes(draw.randrange(256) for _ in range(draw.randrange(4)))
        if piece:
            result[place : place + len(piece)] = piece
        else:
            del result[place:]
    return bytes(result)


def document(draw: Random, base: Any) -> bytes:
    """A JSON text near a good one, or bytes near its text."""
    kind = draw.randrange(8)
    if kind == 0:
        return as_json(value(draw, 3))
    if kind < 3:
        return spoiled(draw, json.dumps(base).encode())
    return as_json(edited(base, edits(draw)))


def places(inside: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything inside a document."""
    items = inside.items() if isinstance(inside, dict) else enumerate(inside) if isinstance(inside, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def edited(base: Any, changes: list[Edit]) -> Any:
    """A copy of a document with the changes made, where they can be."""
    result = copy.deepcopy(base)
    for number, action, new in changes:
        found = list(places(result))
        if not found:
            return new
        *path, last = found[number % len(found)]
        parent = result
        for key in path:
            parent = parent[key]
        _change(parent, last, action, new)
    return result


def _change(parent: Any, key: Any, action: str, new: Any) -> None:
    if action == "drop":
        del parent[key]
    elif action == "add" and isinstance(parent, list):
        parent.insert(key, new)
    elif action in ("rename", "add") and isinstance(parent, dict):
        parent[new if isinstance(new, str) else repr(new)[:20]] = parent.pop(key) if action == "rename" else new
    elif action == "twice" and isinstance(parent, dict):
        parent[Raw(f"{json.dumps(key)}: 1, {json.dumps(key)}")] = new
    else:
        parent[key] = new


def as_json(content: Any) -> bytes:
    """JSON text in which the raw pieces stand as they are."""
    return _text(content).encode("utf-8", "surrogatepass")


def _text(content: Any) -> str:
    if isinstance(content, Raw):
        return str(content)
    if isinstance(content, dict):
        return "{" + ", ".join(f"{_key(key)}: {_text(item)}" for key, item in content.items()) + "}"
    if isinstance(content, list):
        return "[" + ", ".join(map(_text, content)) + "]"
    return json.dumps(content)


def _key(key: Any) -> str:
    return str(key) if isinstance(key, Raw) else json.dumps(key)


class Guard:
    """Sees, through the interpreter's audit events, files that are opened or changed and code that is run."""

    FILES = ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree", "shutil.copyfile")
    CODE = ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        self._process = os.getpid()
        self._seen_by_child = mmap.mmap(-1, 4096)  # shared with processes that are forked while it watches
        self._libraries = tuple(
            {str(Path(place).resolve()) for place in (*sys.path, sys.prefix, sys.base_prefix) if place}
        )
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in self.CODE:
            self._report(f"{event} {arguments!r}"[:200])
        elif event in self.FILES and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((self.folder, *self._libraries, f"/proc/{os.getpid()}/")):
                self._report(f"{event} {path}")

    def _report(self, what: str) -> None:
        self.seen.append(what)
        if os.getpid() != self._process:
            written = ascii(what).encode()[:200]
            self._seen_by_child[: len(written)] = written

    @contextmanager
    def watch(self, folder: Path) -> Iterator[None]:
        """Raises AssertionError when something outside the folder was touched, or for what computes or waits too long.

        Computing is measured in the process's own time, as other processes may leave it little.
        """
        self.seen.clear()
        self._seen_by_child[:] = bytes(len(self._seen_by_child))
        self.folder = str(folder.resolve())
        limits = ((signal.SIGPROF, signal.ITIMER_PROF, CPU_SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, SECONDS))
        before = [signal.signal(number, _too_long) for number, _, _ in limits]
        for _, timer, seconds in limits:
            signal.setitimer(timer, seconds)
        try:
            yield
        finally:
            for (number, timer, _), handler in zip(limits, before, strict=True):
                signal.setitimer(timer, 0)
                signal.signal(number, handler)
            self.folder = None
        self.seen += [text.decode()] if (text := self._seen_by_child[:].rstrip(b"\0")) else []
        assert not self.seen, self.seen


def _too_long(number: int, frame: FrameType | None) -> None:
    raise AssertionError("it did not come to an end")


def peak_megabytes(of: int = resource.RUSAGE_SELF) -> int:
    return resource.getrusage(of).ru_maxrss // 1024

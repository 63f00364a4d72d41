"""A checkpoint's tokenizer and chat template, at work in a process of their own that has limits.

Both come from a stranger, and no reading of them tells what they will do. In tokenizer.json each of these makes the
`tokenizers` library ask for gigabytes or end the process: one vocabulary id near 2**31 (the library walks over all ids
below it), the first four bytes of a `precompiled_charsmap`, a `Sequence` of normalizers that each lengthen the text
(`Replace`, `ByteLevel`). Others make it panic: `Strip`, `FixedLength`, an overlong prefix, a pattern that backtracks.
And a chat template is a program: its sandbox stops calls and long ranges, but neither loops within loops nor a text
doubled sixty times. So all of it runs in a forked child, and what takes too much there ends as one sentence here.
Forking takes milliseconds; a fresh interpreter would import transformers again for every tokenizer.

The child computes with Python and the tokenizers library alone: no torch, whose threads do not survive a fork.
"""

import gc
import json
import os
import resource
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from kvq.calibration.transformers_door import import_tokenizers, load_tokenizer
from kvq.errors import CalibrationError, KvqError, printable_line

CPU_SECONDS = 120  # for loading, and for each text
MEMORY_BYTES = 4 * 2**30  # beyond what this process has when it forks
ANSWER_BYTES = 2**28
LOG_BYTES = 2**20
MAX_WORDS = 20  # lines that loading may say

REMEDY = "Download tokenizer.json and the chat template of {} again, or give rows with `input_ids`."
LONG_TEXT = 2**20  # characters; a row of calibration data has fewer


class TokenizerProcess:
    """Messages to text, text to ids, ids to text. Every method raises CalibrationError for what the files make of it.

    After one that ended the child, the others fail too.
    """

    def __init__(self, folder: Path) -> None:
        import_tokenizers()  # here, once; else in every child
        self._folder, self._remedy = folder, REMEDY.format(folder)
        self._turn = threading.Lock()
        self._log = os.memfd_create("tokenizer")
        self._pid, self._asking, self._answers = _fork(folder, self._log)
        weakref.finalize(self, _end, os.getpid(), self._pid, self._log, self._asking, self._answers)
        self._ask("load", [], f"{folder / 'tokenizer.json'}: the tokenizer cannot be loaded")
        for line in self._said()[:MAX_WORDS]:
            sys.stderr.write(printable_line(line)[:200] + "\n")

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, place: str, **options: bool) -> str:
        """The messages as the chat template writes them."""
        failed = f"{place}: the model's chat template cannot render these messages"
        return str(self._ask("render", [list(messages), list(tools) if tools else None, options], failed))

    def encode(self, text: str, place: str) -> list[int]:
        """Ids with nothing added."""
        ids: list[int] = self._ask("encode", [text], f"{place}: the tokenizer of {self._folder} cannot read this text")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens and spaces as they are."""
        return str(self._ask("decode", [list(ids)], f"{self._folder}: the tokenizer cannot write {len(ids)} tokens"))

    def _ask(self, what: str, arguments: list[Any], failed: str) -> Any:
        try:
            question = json.dumps([what, arguments], default=str).encode()  # a table may hold dates
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{failed} ({type(error).__name__}: {error}). Mend the row.") from None
        with self._turn:
            answer = self._answer(question + b"\n")
            if not answer.endswith(b"\n"):
                raise CalibrationError(f"{failed} ({self._how_it_ended()}). {self._what_to_do(what, arguments)}")
        kind, value = json.loads(answer)
        if kind == "refused":
            raise CalibrationError(value)
        if kind == "failed":
            raise CalibrationError(f"{failed} ({value}). {self._what_to_do(what, arguments)}")
        return value

    def _what_to_do(self, what: str, arguments: list[Any]) -> str:
        """A row of the user's is at fault as often as the checkpoint's files are."""
        otherwise = self._remedy[0].lower() + self._remedy[1:]
        if what == "render":
            return f"Mend this row; where all rows fail, the template: {otherwise}"
        if what == "encode" and len(arguments[0]) > LONG_TEXT:
            return f"Split this text of {len(arguments[0]):,} characters; where short ones fail too, {otherwise}"
        return self._remedy

    def _answer(self, question: bytes) -> bytes:
        """A line, or a part of one where the child ended."""
        try:
            self._asking.write(question)
            self._asking.flush()
        except BrokenPipeError:
            return b""
        return self._answers.readline()

    def _how_it_ended(self) -> str:
        """Why the child is gone. It stays to be waited for by `_end`."""
        ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "without WNOHANG it waits"
        if ended.si_status == signal.SIGXCPU:
            return f"it computed for more than {CPU_SECONDS} seconds"
        said = self._said()
        reasons = [line for line in said if line.startswith("memory allocation of")] or said[-1:]
        return f"its process ended with {ended.si_status}: {' '.join(reasons)[:200]}"

    def _said(self) -> list[str]:
        """What the libraries printed so far, which they do wherever they like; stdout is for kvq's own results."""
        return os.pread(self._log, LOG_BYTES, 0).decode("utf-8", "replace").splitlines()


def _fork(folder: Path, log: int) -> tuple[int, BinaryIO, BinaryIO]:
    """The child's number, and where to write what is asked and read what it answers."""
    (questions, asking), (answers, answering) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that other threads may hold. The child needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _child(folder, questions, answering, log)
    os.close(questions)
    os.close(answering)
    return pid, os.fdopen(asking, "wb"), os.fdopen(answers, "rb")


def _end(owner: int, pid: int, log: int, *pipes: BinaryIO) -> None:
    if os.getpid() != owner:  # a fork of this process, which has no such child
        return
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(log)
    for pipe in pipes:
        try:
            pipe.close()
        except BrokenPipeError:  # it holds a question that the child did not live to read
            continue


# What runs in the child.


def _child(folder: Path, questions: int, answering: int, log: int) -> NoReturn:
    status = 1
    try:
        _give_up_inheritance(questions, answering, log)
        _set_limits()
        _serve(folder, os.fdopen(questions, "rb"), os.fdopen(answering, "wb"))
        status = 0
    except BaseException as error:  # noqa: BLE001  it must not go on in the parent's code
        os.write(log, repr(error).encode())
    finally:
        os._exit(status)


def _give_up_inheritance(questions: int, answering: int, log: int) -> None:
    """The parent's files with their locks, its screen, its garbage, its signals: the parent's end is the child's."""
    gc.freeze()
    sys.stdout = sys.stderr = os.fdopen(log, "w")
    os.dup2(log, 1)
    os.dup2(log, 2)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (1, 2, questions, answering, log):
            with suppress(OSError):  # the one that listed them
                os.close(int(name))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def _set_limits() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each thread would take address space
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, has + MEMORY_BYTES)
    _limit(resource.RLIMIT_FSIZE, LOG_BYTES)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(limit: int, value: int) -> None:
    """Set the soft limit, as far as the hard one allows."""
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _serve(folder: Path, questions: BinaryIO, answering: BinaryIO) -> None:
    tokenizer: list[Any] = []
    for question in questions:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS)
        try:
            answer = json.dumps(["done", _work(folder, tokenizer, *json.loads(question))])
            if len(answer) > ANSWER_BYTES:
                answer = json.dumps(["failed", f"it gives more than {ANSWER_BYTES >> 20} MiB"])
        except KvqError as error:
            answer = json.dumps(["refused", str(error)])
        except MemoryError:
            answer = json.dumps(["failed", f"it needs more than {MEMORY_BYTES >> 30} GiB of memory"])
        except BaseException as error:  # noqa: BLE001  a panic of Rust is no Exception, and a template may raise any
            answer = json.dumps(["failed", f"{type(error).__name__}: {str(error)[:500]}"])
        answering.write(answer.encode() + b"\n")
        answering.flush()


def _work(folder: Path, tokenizer: list[Any], what: str, arguments: list[Any]) -> Any:
    if what == "load":
        return tokenizer.append(load_tokenizer(folder))
    return WORK[what](tokenizer[0], *arguments)


def _render(tokenizer: Any, messages: list[Any], tools: list[Any] | None, options: dict[str, bool]) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


WORK: dict[str, Callable[..., Any]] = {"render": _render, "encode": _encode, "decode": _decode}

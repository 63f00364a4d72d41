"""Where the models of a comparison run: folders in this process, or servers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvq.errors import RecipeError, VerificationError
from kvq.verify.answers import Answerer
from kvq.verify.chat import ChatFormat, stop_ids
from kvq.verify.server import Server, ServerAnswerer


@contextmanager
def opened(folder: Path, url: str | None, device: str, concurrency: int) -> Iterator[tuple[Answerer, str]]:
    """The model of a folder, in this process or behind a server; and its route, for reports.

    Raises CheckpointError, RecipeError, ServerError.
    """
    if url is not None:
        with Server(url, concurrency=concurrency) as server:
            yield ServerAnswerer(server, stop_ids(folder)), "server"
        return
    from kvq.calibration.forward import pick_device
    from kvq.verify.in_process import InProcess

    chosen = pick_device(device)
    yield InProcess(folder, chosen), f"in process, {chosen.type}"


def check_same_prompts(folder: Path, source: Path) -> None:
    """Both must read the same tokens. Raises VerificationError."""
    messages = [{"role": "user", "content": "Add 12 and 30, then say na\u00efve \u4f60\u597d."}]
    ours, theirs = (
        chat.encode(chat.render(messages, None, str(chat.folder))) for chat in map(ChatFormat, (folder, source))
    )
    if ours != theirs:
        raise VerificationError(
            f"{folder} and {source} turn the same message into different tokens (tokenizer or chat template differ); "
            "their answers cannot be compared."
        )


def one_source(source: object, server: object, answers: object, save: object) -> None:
    """Exactly one way to have the source's answers, or none if this run only saves answers. Raises RecipeError."""
    given = [
        flag
        for flag, value in (("--source", source), ("--source-server", server), ("--source-answers", answers))
        if value is not None
    ]
    if save is not None and given:
        raise RecipeError(f"--save-answers asks FOLDER alone, for a later comparison; leave out {given[0]}.")
    if save is None and len(given) != 1:
        raise RecipeError("give one of --source, --source-server and --source-answers (or --save-answers alone).")

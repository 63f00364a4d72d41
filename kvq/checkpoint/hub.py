"""All talk with the Hub goes through here: errors in one sentence, retries, timeouts, and no token in any text."""

import errno
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kvq.errors import CheckpointError, HubError, OutputError

T = TypeVar("T")
Note = Callable[[str], None]

COMMIT_LENGTH = 40
INFO_TIMEOUT_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 30.0
ANSWER_TIMEOUT_SECONDS = 300.0  # a commit of many large files is answered late
ATTEMPTS = 8
LONGEST_WAIT_SECONDS = 60.0
RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)
# By name, because not every version of huggingface_hub that kvq allows has them all.
CLIENT_ERRORS = (
    "HfHubHTTPError", "EntryNotFoundError", "OfflineModeIsEnabled", "RevisionResolutionError", "XetDownloadError",
    "LocalTokenNotFoundError", "OIDCError", "FileMetadataError",
)  # fmt: skip
LOCAL_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO)
DOWNLOAD_ADVICE = (
    "What has arrived is kept; run the same command again, or download the folder by other means and give its path."
)


def client_errors() -> tuple[type[Exception], ...]:
    """What the client raises when the Hub does not do its part.

    RuntimeError is what its upload threads and the Xet client raise; ValueError, KeyError and TypeError are an answer
    that makes no sense.
    """
    import httpx
    from huggingface_hub import errors

    named = [getattr(errors, name) for name in CLIENT_ERRORS if hasattr(errors, name)]
    return (*named, httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError, ValueError, KeyError, TypeError)


@contextmanager
def hub_errors(repo: str, advice: str = DOWNLOAD_ADVICE) -> Iterator[None]:
    """Turn what huggingface_hub raises into kvq's errors, without the token that a server or a library may repeat.

    Raises CheckpointError for an invalid id, OutputError for a local disk that fails, HubError for all else.
    """
    from huggingface_hub.errors import HFValidationError

    be_patient()
    try:
        yield
    except HFValidationError as error:
        raise CheckpointError(f"{repo}: not a valid Hub id ({error}).") from None
    except client_errors() as error:
        said = redact(describe(error))
        local = isinstance(error, OSError) and error.errno in LOCAL_TROUBLE and error.filename is not None
        if local:
            raise OutputError(f"{repo}: the local disk failed ({said}). Mend that and run the command again.") from None
        raise HubError(f"{repo}: the Hub did not deliver ({said}). {advice}") from None


def describe(error: BaseException) -> str:
    """The first line of an error and of what caused it, with what the server said."""
    lines: list[str] = []
    link: BaseException | None = error
    while link is not None:
        text = str(link).strip()
        first = text.splitlines()[0] if text else type(link).__name__
        said = getattr(link, "server_message", None)
        for line in (first, *(str(said).splitlines()[:1] if said else ())):
            if not any(line in other for other in lines):
                lines.append(line)
        link = link.__cause__ if isinstance(link, RuntimeError) else None
    return ": ".join(lines)


def is_transient(error: BaseException | None) -> bool:
    """Whether the same request may succeed later: a server that is busy or away, not one that refuses."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    while error is not None:
        if isinstance(error, HfHubHTTPError):
            return error.response.status_code in RETRIED_STATUS
        if isinstance(error, OfflineModeIsEnabled):
            return False
        if isinstance(error, (httpx.TransportError, ConnectionError, TimeoutError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def retried(call: Callable[[], T], note: Note, attempts: int = ATTEMPTS) -> T:
    """The call's result. Errors that may pass are met by waiting longer each time, up to `attempts` calls in all."""
    for attempt in range(1, attempts):
        try:
            return call()
        except client_errors() as error:
            if not is_transient(error):
                raise
            wait = min(LONGEST_WAIT_SECONDS, 2.0**attempt) * random.uniform(0.5, 1)
            note(f"attempt {attempt} of {attempts} failed ({redact(describe(error))}); again in {wait:.0f} s")
            time.sleep(wait)
    return call()


def hub_info(repo: str, revision: str | None, note: Note, *, files: bool = False) -> Any:
    """huggingface_hub's ModelInfo, its `sha` the commit that a revision names now. To be called in `hub_errors`.

    With `files`, `siblings` have the size and hashes of each file.
    """
    from huggingface_hub import HfApi

    info = retried(
        lambda: HfApi().model_info(repo, revision=revision, timeout=INFO_TIMEOUT_SECONDS, files_metadata=files), note
    )
    if not isinstance(info.sha, str) or len(info.sha) != COMMIT_LENGTH:
        raise HubError(f"{repo}: the Hub gave {info.sha!r} as the commit of {revision or 'main'}. Try again later.")
    return info


def ask_hub(seconds: float) -> tuple[str, str | None]:
    """The Hub's address and whose token this is (None without one), by one request that waits so long at most.

    Raises what the client raises (`client_errors`).
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status

    be_patient()
    path = "/api/whoami-v2" if current_token() else "/api/models?limit=1"
    response = get_session().get(constants.ENDPOINT + path, headers=build_hf_headers(), timeout=seconds)
    hf_raise_for_status(response)
    return constants.ENDPOINT, str(response.json()["name"]) if current_token() else None


def be_patient() -> None:
    """Give every request of the client a timeout: by itself it would wait for a silent server for ever.

    Some of its calls state "no timeout" of their own, so a default is not enough. Also keeps the token out of what the
    client logs.
    """
    import httpx
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    def factory() -> httpx.Client:
        client = _http.default_client_factory()
        client.event_hooks = {**client.event_hooks, "request": [*client.event_hooks["request"], bound]}
        return client

    def bound(request: httpx.Request) -> None:
        stated = request.extensions.get("timeout") or {}
        longest = httpx.Timeout(ANSWER_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS, pool=None).as_dict()
        kept = {name: seconds for name, seconds in stated.items() if seconds is not None}
        request.extensions = {**request.extensions, "timeout": {**longest, **kept}}

    if getattr(_http, "_GLOBAL_CLIENT_FACTORY", None) is _http.default_client_factory:
        set_client_factory(factory)
    for handler in logging.getLogger("huggingface_hub").handlers:
        if not any(isinstance(found, _Redaction) for found in handler.filters):
            handler.addFilter(_Redaction())


class _Redaction(logging.Filter):
    """Takes the token out of a log record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


def redact(text: str) -> str:
    """The text without the token, as it is and as Python or JSON would quote it, and without signed parts of links."""
    text = re.sub(r"(https?://[^\s'\"?]+\?)[^\s'\"]+", r"\1...", text)
    token = current_token()
    if token:
        for form in (token, repr(token)[1:-1], token.encode("unicode_escape").decode()):
            text = text.replace(form, "<token>")
    return text


def current_token() -> str | None:
    """The token of the environment or the login, None where there is none."""
    from huggingface_hub import get_token

    try:
        return get_token()
    except client_errors():
        return None

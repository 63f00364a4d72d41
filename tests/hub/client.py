"""The unmodified huggingface_hub, in this process, pointed at a Hub of the tests; only its clock runs faster."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import close_session, constants
from huggingface_hub.utils import _http

from kvq.checkpoint import hub as kvq_hub
from tests.hub.server import Hub

ANSWER_SECONDS = 0.4
SLEEPS_SHORTER = 500


def point_client(hub: Hub, patch: pytest.MonkeyPatch, home: Path, token: str | None = None) -> None:
    """Endpoint, an empty cache, a token, short waits and short timeouts. `patch` undoes it all."""
    close_session()
    patch.setattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
    for name in ("ENDPOINT", "HF_ENDPOINT"):
        patch.setattr(constants, name, hub.url, raising=False)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    for name, place in (("HF_HOME", ""), ("HF_HUB_CACHE", "hub"), ("HF_TOKEN_PATH", "token"), ("HF_XET_CACHE", "xet")):
        patch.setattr(constants, name, str(home / place))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    patch.setenv("HF_TOKEN", hub.token if token is None else token)
    patch.setenv("NO_PROXY", "*")
    fast = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: time.sleep(seconds / SLEEPS_SHORTER)})
    patch.setattr(kvq_hub, "time", fast)
    patch.setattr(_http, "time", fast)
    patch.setattr(kvq_hub, "ANSWER_TIMEOUT_SECONDS", ANSWER_SECONDS)
    patch.setattr(kvq_hub, "INFO_TIMEOUT_SECONDS", ANSWER_SECONDS)

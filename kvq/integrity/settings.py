"""What the environment asks of the plugin. SGLang hands plugins no arguments of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from kvq.errors import RecipeError

MODE, SWEEP, FAULTS = "KVQ_KV_TAGS", "KVQ_KV_TAGS_SWEEP_SECONDS", "KVQ_KV_TAGS_FAULTS"
Mode = Literal["off", "log", "abort"]
DEFAULT_SWEEP_SECONDS = 60.0
PREFIX = "KVQ_KV_TAG"
FAULT_OPTIONS = frozenset({"rate", "seed", "kinds", "at", "rank"})


@dataclass(frozen=True, slots=True)
class Settings:
    """`log` reports violations and changes nothing; `abort` also ends the request. `sweep_seconds` 0: no sweeps.

    `faults` is for tests of the plugin on a server that serves nobody: see `faults`.
    """

    mode: Mode = "off"
    sweep_seconds: float = DEFAULT_SWEEP_SECONDS
    faults: str = ""

    def environment(self) -> dict[str, str]:
        """The variables that ask a server for this."""
        return {} if self.mode == "off" else {MODE: self.mode, SWEEP: f"{self.sweep_seconds:g}"}


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Raises RecipeError for a variable or a value that means nothing."""
    for name in environment:
        if name.startswith(PREFIX) and name not in (MODE, SWEEP, FAULTS):
            raise RecipeError(f"{name}: there is no such variable; there are {MODE}, {SWEEP} and {FAULTS}")
    mode = environment.get(MODE, "off") or "off"
    if mode not in get_args(Mode):
        raise RecipeError(f"{MODE} is {mode!r}; it can be {', '.join(get_args(Mode))}")
    sweep = environment.get(SWEEP, "") or str(DEFAULT_SWEEP_SECONDS)
    try:
        seconds = float(sweep)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise RecipeError(f"{SWEEP} is {sweep!r}; it must be a number of seconds, 0 for no sweeps")
    return Settings(cast(Mode, mode), seconds, _faults(environment.get(FAULTS, "")))


def _faults(text: str) -> str:
    options = dict(part.partition("=")[::2] for part in text.split(",")) if text else {"rate": "0"}
    try:
        rate = float(options["rate"])
    except (KeyError, ValueError):
        rate = -1.0
    if not 0 <= rate <= 1 or not options.keys() <= FAULT_OPTIONS:
        raise RecipeError(f"{FAULTS} is {text!r}; it must be rate=0.01 and any of {', '.join(sorted(FAULT_OPTIONS))}")
    return text

"""What can go wrong, and who must act.

    KvqError                   1
    |-- RecipeError            2   the request: recipe, flags, model name
    |-- CheckpointError        3   the source: missing, damaged or unsupported tensors and configs
    |-- CalibrationError       4   the calibration data, or activations that went bad
    |-- VerificationError      5   a written checkpoint is not what its manifest says
    |-- QuantizationError      6   the solver: too many fallbacks, a result that cannot be right
    |-- OutputError            7   the place to write: exists already, too little space
    |-- HubError               8   the Hub: unreachable, refused, no such model
    |-- GateError             10   a measured figure misses a limit that was set
    |-- ServerError           11   a serving engine: unreachable, refused, answers nonsense
    |-- RankError             12   of several processes at one job, another one ended
    `-- StoppedError         130   SIGINT came (143: SIGTERM); what is finished is kept

    out of memory              9   on the host or the GPU; Python's and torch's own errors

Every message names the place, what was found and what to do. The number is the exit code.
"""

OUT_OF_MEMORY = 9
INTERRUPTED = 130
MAX_MESSAGE = 2000
KEPT_END = 500  # of a longer one: what to do stands at the end


class KvqError(Exception):
    """Base of all errors that a person can act on; `kvq` prints it as one sentence, without a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        """One printable line: a damaged or hostile file may have control characters, or megabytes, for a name."""
        text = printable_line(super().__str__())
        if len(text) > MAX_MESSAGE:
            text = f"{text[: MAX_MESSAGE - KEPT_END]} [...] {text[-KEPT_END:]}"
        return text


def printable_line(text: str) -> str:
    """The text with what a terminal would act on, or UTF-8 cannot hold, written as escapes."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


class RecipeError(KvqError):
    """The request makes no sense: unknown recipe, wrong value, sizes that do not divide."""

    exit_code = 2


class CheckpointError(KvqError):
    """The source checkpoint is incomplete, damaged or of a kind that kvq does not read."""

    exit_code = 3


class CalibrationError(KvqError):
    """The calibration data cannot be used, or the model's activations are not finite."""

    exit_code = 4


class VerificationError(KvqError):
    """A checkpoint on disk failed its checks."""

    exit_code = 5


class QuantizationError(KvqError):
    """Solving failed for more modules than the recipe allows."""

    exit_code = 6


class OutputError(KvqError):
    """The output cannot be written there."""

    exit_code = 7


class HubError(KvqError):
    """The Hugging Face Hub did not deliver."""

    exit_code = 8


class GateError(KvqError):
    """A measured figure misses a limit that was set for it."""

    exit_code = 10


class ServerError(KvqError):
    """A serving engine did not give what its API promises."""

    exit_code = 11


class RankError(KvqError):
    """Another process of a run with several ended, or cannot be reached."""

    exit_code = 12


class StoppedError(KvqError):
    """A signal asked the run to stop, and it did so between two steps."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def is_out_of_memory(error: BaseException) -> bool:
    """Python's own error, or torch's, which is known by its name: torch is not imported for this."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def exit_code_of(error: BaseException) -> int:
    """The number that `kvq` ends with when this error reaches the top."""
    if isinstance(error, KvqError):
        return error.exit_code
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    return OutputError.exit_code if isinstance(error, OSError) else KvqError.exit_code

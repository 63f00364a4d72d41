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
    `-- StoppedError         130   SIGINT came (143: SIGTERM); what is finished is kept

Every message names the place, what was found and what to do. The number is the exit code.
"""


class KvqError(Exception):
    """Base of all errors that a person can act on; `kvq` prints it as one sentence, without a traceback."""

    exit_code = 1


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


class StoppedError(KvqError):
    """A signal asked the run to stop, and it did so between two steps."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number

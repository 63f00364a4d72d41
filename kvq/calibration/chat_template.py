"""Messages as a model's own chat template writes them. The template is a stranger's program: what it raises is said in
one sentence."""

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from kvq.errors import CalibrationError

# jinja2's own, and what its sandbox lets through of Python's; RecursionError is a RuntimeError of either.
RAISED = (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def render_messages(
    tokenizer: Any, messages: Sequence[Any], tools: Sequence[Any] | None, place: str, *, prompt: bool
) -> str:
    """Text for `messages` and the `tools` they may call; a `prompt` ends where the model's answer begins.

    Raises CalibrationError that begins with `place`, the row or question.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=None if tools is None else list(tools), tokenize=False, add_generation_prompt=prompt
        )
    except RAISED as error:
        raise CalibrationError(
            f"{place}: the model's chat template cannot render these messages ({type(error).__name__}: {error}). Mend "
            "the row, or give `text` or `input_ids`."
        ) from None
    return str(text)

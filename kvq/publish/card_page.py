"""The card's text: one template, and everything that goes into it escaped unless it was made for Markdown here."""

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError

from kvq.errors import VerificationError

# What Markdown, the HTML inside it, tables and math would take for their own.
# An underscore between letters is only an underscore.
SPECIAL = re.compile(r"([\\`*{}\[\]<>|~#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


class Markdown(str):
    """Text that is Markdown already."""

    __slots__ = ()


def escape(value: Any) -> Markdown:
    """Any text as plain words of one line."""
    if isinstance(value, Markdown):
        return value
    text = _one_line(str(value)).replace("&", "&amp;")
    return Markdown(SPECIAL.sub(r"\\\1", text))


def code(value: Any) -> Markdown:
    """Any text as a code span, also in a table: the fence is longer than any in the text."""
    text = _one_line(str(value)).replace("|", "\\|")
    fence = "`" * (_longest_fence(text) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return Markdown(f"{fence}{padding}{text}{padding}{fence}")


def block(value: Any, language: str = "") -> Markdown:
    """Any text as a code block of its own lines."""
    text = "".join(sign if sign == "\n" or sign.isprintable() else "?" for sign in str(value))
    fence = "`" * max(3, _longest_fence(text) + 1)
    return Markdown(f"{fence}{language}\n{text.rstrip()}\n{fence}")


def size(nbytes: int) -> str:
    """Bytes in the decimal unit that suits them."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if nbytes >= unit), (1e3, "kB"))
    return f"{nbytes / unit:.2f} {name}"


def _one_line(text: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in text).strip()


def _longest_fence(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def render_page(values: Mapping[str, Any]) -> str:
    """The whole card. Raises VerificationError for a manifest that lacks what it needs."""
    environment = Environment(
        loader=PackageLoader("kvq.publish", "templates"), undefined=StrictUndefined, finalize=escape, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters |= {"code": code, "block": block, "size": size}
    try:
        return environment.get_template("card.md.jinja").render(**values)
    except (UndefinedError, TypeError, AttributeError) as error:
        raise VerificationError(
            f"the manifest lacks what the card needs, or holds it in another form ({error})."
        ) from None

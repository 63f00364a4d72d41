"""The command line: registers the commands, and turns errors into one sentence and an exit code."""

import platform
import sys
from typing import Annotated

import typer

from kvq import __version__
from kvq.commands.calibrate_kv import calibrate_kv
from kvq.commands.card import card
from kvq.commands.coverage import coverage
from kvq.commands.doctor import doctor
from kvq.commands.download import download
from kvq.commands.evaluate import evaluate
from kvq.commands.inspect import inspect
from kvq.commands.models import models
from kvq.commands.plan import plan
from kvq.commands.quantize import quantize
from kvq.commands.serve_config import serve_config
from kvq.commands.tasks import tasks
from kvq.commands.tool_calls import tool_calls
from kvq.commands.upload import upload
from kvq.commands.verify import verify
from kvq.errors import INTERRUPTED, KvqError, exit_code_of, is_out_of_memory, printable_line
from kvq.screen import tell
from kvq.stop import INTERRUPTED_WORDS, Terminated

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(
    "Offline quantization for GLM and Kimi mixture-of-experts checkpoints: FP8 in, checked INT4 experts out."
))  # fmt: skip
COMMANDS = (
    quantize, models, verify, evaluate, calibrate_kv, tasks, tool_calls, card, plan, inspect, coverage, serve_config,
    download, upload, doctor,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvq.publish.machine import dependency_versions

        typer.echo(f"kvq {__version__}\npython {platform.python_version()}")
        for name, version in dependency_versions().items():
            typer.echo(f"{name} {version}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions of kvq and what it needs."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: an error that a person can act on is one sentence and an exit code, never a traceback."""
    try:
        app()
    except KvqError as error:
        tell(f"kvq: {error}\n")
        sys.exit(exit_code_of(error))
    except Terminated as terminated:
        stopped = terminated.as_error()
        tell(f"kvq: {stopped}\n")
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:  # before typer looks out for it
        tell(INTERRUPTED_WORDS)
        sys.exit(INTERRUPTED)
    except SystemExit as stop:  # typer turns Ctrl-C into this, without a word
        if stop.code == INTERRUPTED:
            tell(INTERRUPTED_WORDS)
        raise
    except OSError as error:  # a place that no command has looked at before
        found = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        tell(f"kvq: {printable_line(found)}. Mend that, and run the same command again.\n")
        sys.exit(exit_code_of(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).split(". ")[0] or "the host has no memory left"
        tell(
            f"kvq: out of memory ({reason}). Use fewer or shorter calibration sequences: --set "
            "num_calibration_samples=..., --set max_seq_length=... (with --restart: it is another run then).\n"
        )
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()

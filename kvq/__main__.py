"""`kvq` and `python -m kvq`."""

import sys

INTERRUPTED = "kvq: interrupted before it began.\n"


def main() -> None:
    """The command line. Ctrl-C is one sentence also while it is still being imported."""
    try:
        from kvq.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write(INTERRUPTED)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()

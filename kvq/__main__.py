"""`kvq` and `python -m kvq`."""

from kvq.screen import prepare_standard_files
from kvq.stop import end_with_words


def main() -> None:
    """The command line. A signal is one sentence also while it is still being imported."""
    prepare_standard_files()
    end_with_words()
    from kvq.cli import main as run

    run()


if __name__ == "__main__":
    main()

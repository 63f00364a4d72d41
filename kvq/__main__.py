"""`python -m kvq`."""

from kvq.cli import main

if __name__ == "__main__":
    main()

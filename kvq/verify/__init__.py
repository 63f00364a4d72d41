"""Checks of what was written, from the files alone, and its distance from the source."""

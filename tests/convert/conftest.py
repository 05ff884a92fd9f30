"""Some of these tests convert a tiny model file."""

from cli_fixtures import tiny

__all__ = ["tiny"]

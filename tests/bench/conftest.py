"""Some of these tests call the command line with a tiny model file."""

from cli_fixtures import tiny, verbatim

__all__ = ["tiny", "verbatim"]

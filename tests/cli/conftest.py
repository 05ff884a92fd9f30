"""The CLI tests call the command line with a tiny model file."""

from cli_fixtures import spawn, tiny, verbatim

__all__ = ["spawn", "tiny", "verbatim"]

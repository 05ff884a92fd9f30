"""Fixtures of tests with several processes."""

from cli_fixtures import tiny

__all__ = ["tiny"]

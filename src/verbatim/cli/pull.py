"""`verbatim pull MODEL`: downloads a model into the cache, so that later runs need no network."""

from __future__ import annotations

import sys

import click

from verbatim.cli.common_options import revision_option
from verbatim.cli.options import DEFAULT_MODEL, Command, Option
from verbatim.cli.terminal import Progress


@click.command(cls=Command)
@click.argument("model", default=DEFAULT_MODEL)
@revision_option()
@click.option("-q", "--quiet", cls=Option, is_flag=True, help="no progress")
def command(model: str, revision: str | None, quiet: bool) -> None:
    """Download MODEL (a catalog name or org/name on the hub) into the cache and print its path.

    A file that is already in the cache is verified, and downloaded again if it is damaged.
    """
    from verbatim.weights.catalog import pull

    progress = Progress(quiet=quiet)
    try:
        path = pull(model, revision=revision, progress=progress)
    finally:
        progress.clear()
    sys.stdout.write(f"{path}\n")

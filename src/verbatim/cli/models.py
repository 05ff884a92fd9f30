"""`verbatim models`: lists the catalog and the models in the hub's cache."""

from __future__ import annotations

import sys
from typing import Any

import click

from verbatim.cli.options import Command, Option
from verbatim.cli.terminal import note, write_json


@click.command(cls=Command)
@click.option("--json", "as_json", cls=Option, is_flag=True, help="print one JSON array")
def command(as_json: bool) -> None:
    """List the models of the catalog and those in the hub's cache."""
    from verbatim.weights.catalog import cache_dir, list_models

    records = list_models()
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "name": r.name,
                "kind": r.kind,
                "bytes": r.bytes,
                "ready": r.ready,
                "path": str(r.path),
                "note": r.note,
            }
            for r in records
        ]
        write_json(rows)
        return
    width = max(len(r.name) for r in records)
    for r in records:
        state = "ready" if r.ready else "to fetch"
        size = f"{r.bytes / 1e6:.{0 if r.bytes >= 10_000_000 else 1}f} MB"
        sys.stdout.write(
            f"{r.name:{width}}  {r.kind:11}  {size:>11}  {state:8}  {r.note}".rstrip() + "\n"
        )
    sys.stdout.flush()
    note(f"cache: {cache_dir()}; any path to a .gguf file or a safetensors directory works too")

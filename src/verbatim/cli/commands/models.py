"""`verbatim models`: lists the catalog and the downloaded models; `show` describes one, `rm`
deletes one from the cache."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from verbatim.base.errors import ModelError
from verbatim.base.json_io import JsonObject
from verbatim.base.units import download_text
from verbatim.cli.lib.command_class import Command, argument, declared, flag
from verbatim.cli.lib.options import JSON
from verbatim.cli.lib.terminal import note, write_json

if TYPE_CHECKING:
    from verbatim.files.describe import ModelDescription
    from verbatim.hub.model_list import ModelRecord


ARRAY = flag("print one JSON array", "--json")


class ModelsGroup(click.Group):
    """A group whose unknown subcommand is probably the name of a model."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            show = f"verbatim models show {args[0]:.60}"
            raise click.UsageError(f"no command 'models {args[0]:.60}'; for one model: {show}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=ModelsGroup, invoke_without_command=True, subcommand_metavar="[list|show|rm] ...")
@declared()
@click.pass_context
def command(ctx: click.Context, as_json: bool = ARRAY) -> None:
    """List the models of the catalog and the downloaded ones; show or delete one."""
    if ctx.invoked_subcommand is None:
        _list(as_json)


@command.command("list", cls=Command)
@declared()
def list_command(as_json: bool = ARRAY) -> None:
    """List the models, as `verbatim models` does."""
    _list(as_json)


def _list(as_json: bool) -> None:
    from verbatim.hub.catalog import cache_dir
    from verbatim.hub.model_list import list_models

    rows = [_row(record) for record in list_models()]
    if as_json:
        write_json(rows)
        return
    names = ("name", "size", "quant", "family", "context", "licence", "")
    table = [
        (
            row["name"],
            download_text(row["bytes"]),
            row["quant"],
            row["family"],
            f"{row['context']:,}" if row["context"] else "",
            row["licence"],
            row["note"] if not row["ready"] and row["path"] else "" if row["ready"] else "to fetch",
        )
        for row in sorted(rows, key=lambda row: not row["ready"])
    ]
    widths = [max(len(line[i]) for line in (names, *table)) for i in range(len(names))]
    for line in (names, *table):
        cells = [
            cell.rjust(width) if i in (1, 4) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    sys.stdout.flush()
    note(
        f"cache: {cache_dir()}; `verbatim pull NAME` fetches one; org/name on the hub, a .gguf file"
        " or a safetensors directory work too"
    )


def _row(record: ModelRecord) -> JsonObject:
    """One model as plain data: from its file if it is in the cache, else from the catalog."""
    from verbatim.files.describe import describe

    row = asdict(record) | {"path": "" if record.path == Path() else str(record.path)}
    if record.ready:
        try:
            found = describe(record.path)
        except ModelError as error:
            return {**row, "note": error.message}
        row |= {"family": found.family, "quant": found.quant, "context": found.context or 0}
        row["licence"] = found.licence or record.licence
    return row


@command.command("show", cls=Command)
@declared()
def show(model: str = argument(), as_json: bool = JSON) -> None:
    """Describe MODEL: a downloaded model, a .gguf file or a safetensors directory."""
    from verbatim.files.describe import describe
    from verbatim.hub.catalog import resolve, sampling_defaults

    path = resolve(model, offline=True)
    found = describe(path)
    sampling = sampling_defaults(model, path)
    if as_json:
        row = {"model": model, "path": str(path), **asdict(found), "types": dict(found.types)}
        write_json({**row, "sampling": sampling})
        return
    for name, value in _lines(found, path, sampling):
        if value:
            sys.stdout.write(f"{name:<12}{value}\n")


def _lines(
    found: ModelDescription, path: Path, sampling: dict[str, float]
) -> list[tuple[str, str]]:
    from verbatim.files.describe import bytes_on_disk

    return [
        ("path", str(path)),
        ("title", found.title),
        ("family", found.family),
        ("parameters", f"{found.parameters / 1e6:,.1f} million"),
        ("size", download_text(bytes_on_disk(path))),
        ("quant", f"{found.quant} ({', '.join(f'{n} {t}' for t, n in found.types)} tensors)"),
        ("context", f"{found.context:,} tokens" if found.context else ""),
        ("vocabulary", f"{found.vocabulary:,} tokens"),
        ("template", "yes" if found.template else "no chat template"),
        ("licence", found.licence),
        ("sampling", ", ".join(f"{k} {v:g}" for k, v in sampling.items())),
    ]


@command.command("rm", cls=Command)
@click.argument("model")
def rm(model: str) -> None:
    """Delete MODEL from the cache. A file or folder of yours is never deleted."""
    from verbatim.hub.model_list import remove

    if Path(model).exists():
        raise ModelError(f"{model!r} is a path; delete the file yourself", file=None)
    files, freed = remove(model)
    for file in files:
        sys.stdout.write(f"{file}\n")
    note(f"{download_text(freed)} freed")

"""`verbatim merge MODEL ADAPTER -o OUT`: a model and a LoRA adapter come in; the merged model goes
out, as a safetensors directory or a GGUF file."""

from __future__ import annotations

from pathlib import Path

import click

from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.options import OFFLINE
from verbatim.cli.lib.terminal import Progress, note, warn
from verbatim.cli.lib.texts import check_output


@as_command()
def command(
    model: str = argument(),
    adapter: str = argument(type=click.Path()),
    out: str = flag(
        "a directory (safetensors), or a file that ends in .gguf",
        *("-o", "--out"),
        required=True,
        metavar="OUT",
    ),
    requantise: bool = flag("merge into a quantised GGUF file, which adds to its error"),
    force: bool = flag("overwrite a file OUT"),
    offline: bool = OFFLINE,
) -> int:
    """Add the LoRA adapter ADAPTER (PEFT directory or GGUF file) to the weights of MODEL.

    The sums are computed in float32 and stored in the types of MODEL. Tokenizer, chat template and
    configs are kept. `--adapter` of run, chat and serve needs no merge.
    """
    from verbatim.hub.catalog import resolve
    from verbatim.lora.adapter_load import load_adapter
    from verbatim.model.loading.load import load_model

    target = Path(out)
    check_output("out", out) if target.suffix == ".gguf" else _check_folder(target)
    if target.exists() and not force:
        raise ParameterError("out", f"{out!r} exists; --force overwrites it")
    path = resolve(model, offline=offline, progress=Progress())
    loaded = load_model(path)
    found = load_adapter("adapter", adapter, loaded.spec, loaded.weights, to_merge=True)
    for line in found.warnings:
        note(f"warning: {line}")
    if target.suffix == ".gguf":
        from verbatim.convert.merge_adapter import merged_model
        from verbatim.convert.source import write_merged

        write_merged(path, target, warn, lambda m: merged_model(m, found, requantise=requantise))
    elif not path.is_dir():
        raise ParameterError("out", f"{out!r} does not end in .gguf, and {model} is a GGUF file")
    else:
        from verbatim.convert.merge_adapter import merge_directory

        merge_directory(path, Path(adapter), target)
    note(f"{len(found.parts)} matrices of rank {found.rank} or less merged into {out}")
    return 0


def _check_folder(target: Path) -> None:
    if target.exists():
        raise ParameterError("out", f"{str(target)!r} exists; choose a new directory")
    if not target.parent.is_dir():
        raise ParameterError("out", f"{str(target.parent)!r} is not a directory; make it first")

"""`verbatim convert SRC DST.gguf --quant TYPE`: a model comes in, a (quantised) GGUF file goes out.
The file is written atomically: complete or not at all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import Command, argument, as_command, flag
from verbatim.cli.lib.options import OFFLINE
from verbatim.cli.lib.terminal import Progress, note, warn, write
from verbatim.cli.lib.texts import check_output, file_text
from verbatim.convert.tensor_types import FILE_TYPES, FLOATS, MIXTURES, reason, type_for

if TYPE_CHECKING:
    from verbatim.files.gguf_write import LazyTensor
    from verbatim.formats.tensor import Tensor

WINDOW = 512  # tokens per perplexity window, as in llama.cpp


class ConvertCommand(Command):
    """Names --quant for a type that is an argument, as in `llama-quantize IN OUT Q8_0`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            types = [word for word in given[2:] if word.lower() in (*FILE_TYPES, *MIXTURES)]
            if not types or "extra argument" not in error.message:
                raise
            why = f"the type {types[0]!r} is not an argument; write --quant {types[0].lower()}"
            raise click.UsageError(why, ctx) from None


@as_command(cls=ConvertCommand)
def command(
    source: str = argument(),
    target: str = argument(type=click.Path(dir_okay=False)),
    quant: str | None = flag(
        f"type of the weight matrices: {', '.join(FILE_TYPES)}; default: unchanged", metavar="TYPE"
    ),
    head: str | None = flag(
        "type of embedding and output head [q8_0 if --quant is smaller]", metavar="TYPE"
    ),
    requantise: bool = flag("quantise a source that is quantised already, which adds to its error"),
    perplexity: str | None = flag(
        "compare the perplexity of this text before and after", metavar="FILE"
    ),
    force: bool = flag("overwrite TARGET"),
    offline: bool = OFFLINE,
) -> int:
    """Write the model SOURCE (.gguf file, safetensors directory, catalog name, org/name) as TARGET.

    Metadata, tokenizer and chat template are kept. Norms and biases stay float. A model property
    that GGUF cannot express is an error that names it.
    """
    from verbatim.files.describe import bytes_on_disk
    from verbatim.hub.catalog import resolve

    quant, head = _type_name("quant", quant), _type_name("head", head)
    out = _checked_target(target, force)
    text = file_text(perplexity, "perplexity") if perplexity else None
    progress = Progress()
    path = resolve(source, offline=offline, progress=progress)
    _convert(path, out, quant, head, requantise, progress)
    before, after = bytes_on_disk(path), out.stat().st_size
    note(f"{source} ({before / 1e6:.1f} MB) -> {target} ({after / 1e6:.1f} MB)")
    if text is not None:
        _compare(path, out, text)
    return 0


def _convert(
    path: Path, out: Path, quant: str | None, head: str | None, requantise: bool, progress: Progress
) -> None:
    from verbatim.convert.source import read_source
    from verbatim.files.gguf_write import write_gguf
    from verbatim.files.split import with_siblings

    if out.exists() and any(file.exists() and out.samefile(file) for file in with_siblings(path)):
        raise ParameterError("target", "is the source itself; choose another name")
    metadata, kinds, tensors = read_source(path, warn)
    chosen = {
        name: type_for(name, tensor.type, tensor.shape, quant, head)
        for name, tensor in tensors.items()
    }
    if not requantise:
        _check_source(tensors, chosen)
    _explain_types(tensors, chosen, quant)
    if quant:
        file_type = FILE_TYPES[quant].number
        metadata |= {"general.file_type": file_type, "general.quantization_version": 2}
        kinds |= {"general.file_type": "u32", "general.quantization_version": "u32"}
    try:
        write_gguf(out, metadata, _converted(tensors, chosen, progress), types=kinds)
    finally:
        progress.clear()


def _checked_target(target: str, force: bool) -> Path:
    out = Path(target)
    if out.suffix != ".gguf":
        raise ParameterError("target", f"{target!r} does not end in .gguf")
    check_output("target", target)
    if out.exists() and not force:
        raise ParameterError("target", f"{target!r} exists; --force overwrites it")
    return out


def _type_name(param: str, given: str | None) -> str | None:
    """One of FILE_TYPES, from a name in any case. A mixture of llama.cpp becomes its main type."""
    if given is None:
        return None
    name = given.lower()
    if name in FILE_TYPES:
        return name
    if name in MIXTURES:
        note(
            f"{given} is a mixture of llama.cpp, with some matrices in a larger type; every matrix "
            f"is written as {MIXTURES[name]}, embedding and head as --head says"
        )
        return MIXTURES[name]
    raise ParameterError(param, f"{given!r} is not one of {', '.join((*FILE_TYPES, *MIXTURES))}")


def _check_source(tensors: dict[str, Tensor], chosen: dict[str, str]) -> None:
    """Refuse to quantise again what is quantised already: both errors would add up."""
    again = [t for n, t in tensors.items() if t.type not in FLOATS and chosen[n] != t.type]
    if again:
        some = f"{len(again)} matrices, such as {again[0].name} in {again[0].type}"
        why = f"the source is quantised already ({some}), and quantising it again adds to its error"
        remedy = "start from the original weights, or use --requantise"
        raise ParameterError("quant", f"{why}; {remedy}")


def _explain_types(tensors: dict[str, Tensor], chosen: dict[str, str], quant: str | None) -> None:
    """Report the matrices that are written in another type than --quant, and why."""
    if quant is None:
        return
    counts = Counter(
        (chosen[name], reason(name, tensor.shape, quant))
        for name, tensor in tensors.items()
        if len(tensor.shape) > 1 and chosen[name] != quant
    )
    for (type, why), number in sorted(counts.items()):
        note(f"{number} {'matrix is' if number == 1 else 'matrices are'} written as {type}: {why}")


def _converted(
    tensors: dict[str, Tensor], chosen: dict[str, str], progress: Progress
) -> Iterator[Tensor | LazyTensor]:
    from verbatim.files.gguf_write import LazyTensor, converted

    total = len(tensors)
    for number, tensor in enumerate(tensors.values(), 1):
        lazy = converted(tensor, chosen[tensor.name])

        def make(lazy: LazyTensor = lazy, number: int = number) -> Any:
            progress(f"writing {number} of {total}: {lazy.name} as {lazy.type}")
            return lazy.make()

        yield LazyTensor(lazy.name, lazy.type, lazy.shape, make)


# ------------------------------------------------------------------------------------- perplexity


def _compare(before: Path, after: Path, text: str) -> None:
    from verbatim.engine.calls.llm import LLM

    results = []
    for path in (before, after):
        with LLM(str(path)) as llm:
            window = min(WINDOW, llm.context)
            results.append(llm.score(text, window=window, stride=window).perplexity)
    old, new = results
    if math.isnan(old):
        raise ParameterError("perplexity", "the text has fewer than two tokens; give a longer one")
    write("\tsource\ttarget\tchange\n")
    write(f"perplexity\t{old:.4f}\t{new:.4f}\t{(new / old - 1) * 100:+.2f} %\n")

"""`verbatim convert SRC DST.gguf --quant TYPE`: a model comes in, a (quantised) GGUF file goes out.
The file is written atomically: complete or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from verbatim.base.defaults import (
    catalog_defaults,
    gguf_metadata,
    read_generation_config,
    without_gguf_key,
)
from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import Command, option, switch
from verbatim.cli.lib.options import offline_option
from verbatim.cli.lib.terminal import Progress, note, warn, write
from verbatim.cli.lib.texts import check_output, file_text
from verbatim.formats.registry import FORMATS

if TYPE_CHECKING:
    from verbatim.files.gguf_write import LazyTensor
    from verbatim.formats.tensor import Tensor
    from verbatim.model.loading.load import Model

# Types that `convert` writes, by value of general.file_type as llama.cpp numbers them.
FILE_TYPES = {name: f.file_type for name, f in FORMATS.items() if f.file_type is not None}
# llama.cpp's names of mixtures -> the type that most of their matrices have.
MIXTURES = {mixture: name for name, f in FILE_TYPES.items() for mixture in f.mixtures}
FLOATS = ("f32", "f16", "bf16")
# Ends of the names of small matrices that decide much: routers and gates.
UNQUANTISED = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_alpha", "ssm_beta", "ssm_ba")
KERNELS = ("shortconv.conv", "ssm_conv1d")  # llama.cpp's convolution takes float32 only
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
            raise click.UsageError(
                f"the type {types[0]!r} is not an argument; write --quant {types[0].lower()}", ctx
            ) from None


@click.command(cls=ConvertCommand)
@click.argument("source")
@click.argument("target", type=click.Path(dir_okay=False))
@option(
    "--quant",
    metavar="TYPE",
    help=f"type of the weight matrices: {', '.join(FILE_TYPES)}; default: unchanged",
)
@option(
    "--head",
    "head",
    metavar="TYPE",
    help="type of embedding and output head [q8_0 if --quant is smaller]",
)
@switch("--requantise", help="quantise a source that is quantised already, which adds to its error")
@option("--perplexity", metavar="FILE", help="compare the perplexity of this text before and after")
@switch("--force", help="overwrite TARGET")
@offline_option()
def command(
    source: str,
    target: str,
    quant: str | None,
    head: str | None,
    requantise: bool,
    perplexity: str | None,
    force: bool,
    offline: bool,
) -> int:
    """Write the model SOURCE (.gguf file, safetensors directory, catalog name, org/name) as TARGET.

    Metadata, tokenizer and chat template are kept. Norms and biases stay float. A model property
    that GGUF cannot express is an error that names it.
    """
    from verbatim.files.gguf_write import write_gguf
    from verbatim.files.split import with_siblings
    from verbatim.hub.catalog import resolve

    quant, head = _type_name("quant", quant), _type_name("head", head)
    out = Path(target)
    if out.suffix != ".gguf":
        raise ParameterError("target", f"{target!r} does not end in .gguf")
    check_output("target", target)
    if out.exists() and not force:
        raise ParameterError("target", f"{target!r} exists; --force overwrites it")
    text = file_text(perplexity, "perplexity") if perplexity else None
    progress = Progress()
    path = resolve(source, offline=offline, progress=progress)
    if out.exists() and any(file.exists() and out.samefile(file) for file in with_siblings(path)):
        raise ParameterError("target", "is the source itself; choose another name")
    metadata, kinds, tensors = _read_model(path)
    chosen = {
        name: _type_for(name, tensor.type, tensor.shape, quant, head)
        for name, tensor in tensors.items()
    }
    if not requantise:
        _check_source(tensors, chosen)
    _explain_types(tensors, chosen, quant)
    if quant:
        metadata = {
            **metadata,
            "general.file_type": FILE_TYPES[quant].number,
            "general.quantization_version": 2,
        }
        kinds = {**kinds, "general.file_type": "u32", "general.quantization_version": "u32"}
    try:
        write_gguf(out, metadata, _converted(tensors, chosen, progress), types=kinds)
    finally:
        progress.clear()
    from verbatim.files.describe import bytes_on_disk

    before, after = bytes_on_disk(path), out.stat().st_size
    note(f"{source} ({before / 1e6:.1f} MB) -> {target} ({after / 1e6:.1f} MB)")
    if text is not None:
        _compare(path, out, text)
    return 0


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
        raise ParameterError(
            "quant",
            f"the source is quantised already ({len(again)} matrices, such as {again[0].name} in "
            f"{again[0].type}), and quantising it again adds to its error; start from the original "
            "weights, or use --requantise",
        )


def write_merged(path: Path, target: Path, change: Callable[[Model], Model]) -> None:
    """Write a changed model as GGUF; every other tensor and key is the source's, and vectors are
    float32."""
    from verbatim.files.gguf_write import converted, write_gguf

    metadata, kinds, tensors = _read_model(path, change)
    if path.is_file():
        from verbatim.convert.export_model import model_tensors
        from verbatim.model.loading.load import load_model

        before = load_model(path)
        after = change(before)
        kept = before.weights.tensors
        changed = {n for n, tensor in after.weights.items() if tensor is not kept[n]}
        tensors |= {t.name: t for t in model_tensors(after, only=changed)}
    written = [
        converted(t, _type_for(t.name, t.type, t.shape, None, None)) for t in tensors.values()
    ]
    write_gguf(target, metadata, written, types=kinds)


def _read_model(
    path: Path, change: Callable[[Model], Model] | None = None
) -> tuple[dict[str, Any], dict[str, str], dict[str, Tensor]]:
    """Metadata, the GGUF types of its values, and tensors by their GGUF names. `change` replaces
    the weights of a safetensors model."""
    if path.is_file():
        from verbatim.files.gguf import read_gguf
        from verbatim.hub.catalog import sampling_defaults

        file = read_gguf(path)
        stated = gguf_metadata(catalog_defaults(sampling_defaults("", path)))
        # the file's own keys win
        return {**stated, **file.metadata}, dict(file.types), dict(file.tensors)
    from verbatim.convert.export_model import check_round_trip, model_metadata, model_tensors
    from verbatim.convert.export_tokenizer import tokenizer_metadata
    from verbatim.model.families import gguf_architecture
    from verbatim.model.loading.load import load_model
    from verbatim.text.templates.template_files import template_from_directory
    from verbatim.text.tokenizer import from_directory

    model = load_model(path)
    for line in model.warnings:
        warn(line)
    if change is not None:
        model = change(model)
    arch = gguf_architecture(model.spec.family)
    metadata, extra = model_metadata(model, path.name)
    tokenizer = from_directory(path)
    metadata |= tokenizer_metadata(path, tokenizer, model.spec.vocab, arch, model.eos_ids)
    template = template_from_directory(path)
    if template is not None:
        key = "tokenizer.chat_template"
        named = {name: one for name, one in sorted(template.sources.items()) if name != "default"}
        metadata |= {key: template.source, **{f"{key}.{name}": one for name, one in named.items()}}
        if named:
            metadata[f"{key}s"] = list(named)
    defaults = read_generation_config(model.generation_config)
    metadata |= gguf_metadata(defaults)
    for name in without_gguf_key(defaults):
        warn(f"generation_config.json: {name} has no key in GGUF, so the file does not state it")
    stated = {"normalisation": model.embedding.normalise, "prompts": model.embedding.prompts}
    if lost := [name for name, value in stated.items() if value]:
        warn(
            f"{' and '.join(lost)} of modules.json have no key in GGUF; keep the safetensors "
            "directory for embeddings with them"
        )
    tensors = {tensor.name: tensor for tensor in (*extra, *model_tensors(model))}
    check_round_trip(model, metadata, tensors)
    return metadata, {}, tensors


# ----------------------------------------------------------------------------------- tensor types


def _type_for(
    name: str, type: str, shape: tuple[int, ...], quant: str | None, head: str | None
) -> str:
    """The type to write a tensor as. Matrices become `quant`; routers and position embeddings
    keep their type; convolutions and 1-D tensors (norms, biases, rope tables) become f32."""
    stem = name.removesuffix(".weight")
    if len(shape) < 2 or stem.endswith(KERNELS):
        return "f32" if type in ("f16", "bf16") else type
    if stem == "position_embd" or stem.endswith(UNQUANTISED) or quant is None:
        return head or type if stem in ("token_embd", "output") else type
    chosen = quant
    if stem in ("token_embd", "output"):
        chosen = head or (
            quant if FORMATS[quant].size / FORMATS[quant].values >= 34 / 32 else "q8_0"
        )
    if shape[-1] % FORMATS[chosen].values:
        chosen = FILE_TYPES[chosen].small or type
    return chosen if shape[-1] % FORMATS[chosen].values == 0 else type


def _explain_types(tensors: dict[str, Tensor], chosen: dict[str, str], quant: str | None) -> None:
    """Report the matrices that are written in another type than --quant."""
    if quant is None:
        return
    counts: dict[str, int] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) > 1 and chosen[name] != quant:
            counts[chosen[name]] = counts.get(chosen[name], 0) + 1
    for type, number in sorted(counts.items()):
        note(
            f"{number} {'matrix is' if number == 1 else 'matrices are'} written as {type}: "
            f"embedding and head, or a row length that the block size of {quant} does not divide"
        )


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

"""`verbatim embed TEXT...`: the embedding of each text, one JSON array per line."""

from __future__ import annotations

import json
from typing import Any

import click

from verbatim.base.errors import ParameterError
from verbatim.cli.lib.command_class import Command, option, switch
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import NO_SAMPLING, engine_options, json_option, model_options
from verbatim.cli.lib.sampling_options import chosen_adapter, use_adapter_option
from verbatim.cli.lib.terminal import note, write, write_json
from verbatim.cli.lib.texts import decode_argument, read_prompt, read_text


@click.command(cls=Command)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@option("--file", "file", metavar="FILE", help="read the texts from FILE, one per line")
@option(
    "--prompt-name",
    metavar="NAME",
    help="the model's prompt to put before each text, such as query or document",
)
@option("--dimensions", type=int, help="keep the first N numbers (Matryoshka models)")
@switch("--truncate", help="cut texts that are too long")
@switch("--similarity", help="print the cosine similarity of all texts")
@json_option()
@model_options
@engine_options(unused=NO_SAMPLING)
@use_adapter_option
def command(
    texts: tuple[str, ...],
    file: str | None,
    prompt_name: str | None,
    dimensions: int | None,
    truncate: bool,
    similarity: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Embedding of each TEXT: its hidden states, pooled as the model's files say.

    Each argument is one text, in quotes; `-`, or no argument and a pipe, reads one text per line of
    stdin. A model that states no pooling needs --pooling.
    """
    given = read_lines(texts, file, "text")
    adapter = chosen_adapter(flags, flags.pop("use_adapter", None))
    with open_llm(flags, quiet=as_json) as llm:
        vectors = llm.embed(
            given,
            prompt_name=prompt_name,
            dimensions=dimensions,
            truncate=truncate,
            adapter=adapter,
        )
        rows = [[round(float(x), 8) for x in vector] for vector in vectors]
        if as_json:
            out = {
                "embeddings": rows,
                "model": llm.loaded.name,
                "fingerprint": llm.fingerprint,
                "pooling": llm.loaded.embedding.pooling,
            }
            write_json(out)
            return 0
        if similarity:
            import numpy as np

            unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            rows = [[round(float(x), 4) for x in row] for row in unit @ unit.T]
        for row in rows:
            write(json.dumps(row) + "\n")
        note(f"{len(given)} texts · {vectors.shape[1]} dimensions")
    return 0


def read_lines(args: tuple[str, ...], file: str | None, param: str) -> list[str]:
    """The texts: the arguments, the lines of `file`, or the lines of stdin."""
    if file is not None and args:
        raise ParameterError(
            param, f"--file {file} and an argument contradict each other; give one"
        )
    if file is not None:
        return _non_empty(read_text(file, param), param)
    if args and args != ("-",):
        return [decode_argument(text, param) for text in args]
    return _non_empty(read_prompt(args, param), param)


def _non_empty(text: str, param: str) -> list[str]:
    # not splitlines(), which ends a line at U+2028, U+0085 and form feeds too
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise ParameterError(param, "no line has text; give one text per line")
    return lines

"""`verbatim embed TEXT...`: the embedding of each text, one JSON array per line."""

from __future__ import annotations

import json
from typing import Any

from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import JSON, NO_SAMPLING, engine_options, model_options
from verbatim.cli.lib.sampling_options import chosen_adapter, use_adapter_flag
from verbatim.cli.lib.terminal import note, write, write_json
from verbatim.cli.lib.texts import read_lines


@as_command(model_options, engine_options(unused=NO_SAMPLING))
def command(
    texts: tuple[str, ...] = argument("[TEXT]...", nargs=-1),
    file: str | None = flag("read the texts from FILE, one per line", metavar="FILE"),
    prompt_name: str | None = flag(
        "the model's prompt to put before each text, such as query or document", metavar="NAME"
    ),
    dimensions: int | None = flag("keep the first N numbers (Matryoshka models)"),
    truncate: bool = flag("cut texts that are too long"),
    similarity: bool = flag("print the cosine similarity of all texts"),
    as_json: bool = JSON,
    use_adapter: str | None = use_adapter_flag(),
    **flags: Any,
) -> int:
    """Embedding of each TEXT: its hidden states, pooled as the model's files say.

    Each argument is one text, in quotes; `-`, or no argument and a pipe, reads one text per line of
    stdin. A model that states no pooling needs --pooling.
    """
    given = read_lines(texts, file, "text")
    adapter = chosen_adapter(flags, use_adapter)
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
            about = {"model": llm.loaded.name, "fingerprint": llm.fingerprint}
            pooling = llm.loaded.embedding.pooling
            write_json({"embeddings": rows, **about, "pooling": pooling})
            return 0
        if similarity:
            import numpy as np

            unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            rows = [[round(float(x), 4) for x in row] for row in unit @ unit.T]
        for row in rows:
            write(json.dumps(row) + "\n")
        note(f"{len(given)} texts · {vectors.shape[1]} dimensions")
    return 0

"""`verbatim rerank QUERY DOCUMENT...`: documents by their relevance to a query, best first."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from verbatim.cli.lib.command_class import argument, as_command, flag
from verbatim.cli.lib.open_model import open_llm
from verbatim.cli.lib.options import JSON, NO_SAMPLING, engine_options, model_options
from verbatim.cli.lib.terminal import write, write_json
from verbatim.cli.lib.texts import decode_argument, read_lines


@as_command(model_options, engine_options(unused=("pooling", *NO_SAMPLING)))
def command(
    query: str = argument(),
    documents: tuple[str, ...] = argument("[DOCUMENT]...", nargs=-1),
    file: str | None = flag("read the documents from FILE, one per line", metavar="FILE"),
    top_n: int | None = flag("print only the best N [all documents]"),
    truncate: bool = flag("cut documents that are too long"),
    as_json: bool = JSON,
    **flags: Any,
) -> int:
    """Score each DOCUMENT by its relevance to QUERY with a cross-encoder, best first.

    Each argument is one text, in quotes; `-`, or no document and a pipe, reads one per line of
    stdin. A line of output is the score, the document's index and the document, with tabs between.
    """
    given = read_lines(documents, file, "document")
    with open_llm(flags, quiet=as_json) as llm:
        ranked = llm.rerank(decode_argument(query, "query"), given, top_n=top_n, truncate=truncate)
        if as_json:
            results = [asdict(row) for row in ranked]
            write_json(
                {"results": results, "model": llm.loaded.name, "fingerprint": llm.fingerprint}
            )
            return 0
        for row in ranked:
            write(f"{row.score:.6f}\t{row.index}\t{row.document}\n")
    return 0

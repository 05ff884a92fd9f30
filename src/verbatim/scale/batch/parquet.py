"""Request and answer files of a batch in Parquet, with pyarrow.

A request file has the columns custom_id, url, body (JSON text, or a struct) and optionally method.
An answer file has custom_id, status_code, body (JSON text) and error (the message, or null), in the
order of the requests. Rows pass through the same JSON lines as a JSONL file, so they get the same
checks and the same answers.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from verbatim.base.errors import BackendError, ParameterError
from verbatim.base.json_io import JsonObject, no_key_twice


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BackendError(
            "Parquet files need pyarrow; install the extra 'ray':"
            " pip install '.[ray]' in the checkout"
        ) from None
    return pyarrow


def require_pyarrow() -> None:
    """Raise if Parquet files cannot be written, before any work is done."""
    _pyarrow()


def read_rows(path: Path) -> Generator[bytes, None, None]:
    """The rows of a request file as JSON lines."""
    arrow = _pyarrow()
    try:
        file = arrow.parquet.ParquetFile(path)
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                # a timestamp is no JSON value; as text, the check of the line names its column
                yield json.dumps(_request(row), default=str).encode()
    except (arrow.ArrowInvalid, OSError) as error:
        raise ParameterError("IN", f"{path} is not a Parquet file: {error}") from None


def _request(row: JsonObject) -> JsonObject:
    out = {name: value for name, value in row.items() if value is not None}
    if isinstance(out.get("body"), str):
        try:
            out["body"] = json.loads(out["body"], object_pairs_hook=no_key_twice)
        except (ValueError, RecursionError) as error:
            why = f"the body of {out.get('custom_id')!r:.40} is not JSON: {error}"
            raise ParameterError("IN", why) from None
    elif isinstance(out.get("body"), dict):  # a struct has every field in every row
        out["body"] = {key: value for key, value in out["body"].items() if value is not None}
    return out


def journal_answers(journal: Path) -> JsonObject:
    """The responses of a JSONL file by custom_id."""
    with open(journal, "rb") as file:  # str.splitlines() would also split at U+2028 in a text
        lines = map(json.loads, file)
        return {line["custom_id"]: line["response"] for line in lines}


def write_answers(journal: Path, target: Path, order: Sequence[str]) -> None:
    """Write the answers of a JSONL file as Parquet, complete or not at all."""
    arrow = _pyarrow()
    answers = journal_answers(journal)
    names = [name for name in order if name in answers]
    bodies = [answers[name]["body"] for name in names]
    columns = {
        "custom_id": names,
        "status_code": [answers[name]["status_code"] for name in names],
        "body": [json.dumps(body, ensure_ascii=False) for body in bodies],
        "error": [_message(body) for body in bodies],
    }
    types = {"status_code": arrow.int32()}
    table = arrow.table(
        {n: arrow.array(rows, types.get(n, arrow.string())) for n, rows in columns.items()}
    )
    part = target.with_name(target.name + ".part")
    arrow.parquet.write_table(table, part)
    part.replace(target)


def _message(body: JsonObject) -> str | None:
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else None

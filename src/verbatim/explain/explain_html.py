"""An explained answer as one HTML page. In: records of Choice.explain (explanation.py). Out: a page
that needs no network, no script and no other file.

The answer stands at the top, each token coloured by its probability and linked to its own section
below: what each sampler stage removed, and the candidates with bars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from verbatim.base.json_io import JsonMapping
from verbatim.explain.explanation import (
    LEGEND,
    Text,
    headline,
    percent,
    quoted,
    stage_columns,
    top_columns,
)

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; font-family: ui-monospace, monospace; }
.answer { font-size: 1.15rem; white-space: pre-wrap; border: 1px solid #8886; padding: 1rem; }
.answer a { color: inherit; text-decoration: none; border-radius: 3px; }
.answer a:hover, .answer a:focus { outline: 2px solid currentColor; }
table { border-collapse: collapse; font: 14px/1.4 ui-monospace, monospace; margin: .5rem 0; }
th, td { padding: .1rem .7rem .1rem 0; text-align: right; } .left { text-align: left; }
tr.drawn { font-weight: bold; } .bar { width: 9rem; }
.bar span { display: block; height: .7rem; background: #4a90d9; }
section { border-top: 1px solid #8886; } section:target { background: #fd06; }
.quiet { color: #888; }
"""


def explain_page(
    records: Sequence[Mapping[str, object]],
    text: Text,
    *,
    title: str,
    prompt: str,
    params: Mapping[str, Mapping[str, object]],
) -> str:
    """The page of one answer. `params`: base.defaults.report."""
    force = ", ".join(f"{name} {row['value']} ({row['origin']})" for name, row in params.items())
    legend = "".join(f"<li>{escape(line)}</li>" for line in LEGEND)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        "<meta http-equiv=Content-Security-Policy "
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1><p><b>Prompt</b> {escape(prompt)}</p>",
        f"<p class=answer>{''.join(_token(i, r, text) for i, r in enumerate(records, 1))}</p>",
        f"<p class=quiet>{escape(force)}</p><ul class=quiet>{legend}</ul>",
        *(_section(i, record, text) for i, record in enumerate(records, 1)),
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _decoded(text: Text, token: int) -> str:
    raw = text(token)
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw


def _token(number: int, record: JsonMapping, text: Text) -> str:
    """One token of the answer: the less likely, the stronger its colour."""
    chance = math.exp(record["logprob"])
    hint = f"token {number}: p {percent(chance)}, rank {record['rank']}"
    return (
        f'<a href="#t{number}" title="{escape(hint)}" '
        f'style="background: rgba(230, 80, 40, {0.75 * (1 - chance):.3f})">'
        f"{escape(_decoded(text, record['token'])) or '&#8203;'}</a>"
    )


def _section(number: int, record: JsonMapping, text: Text) -> str:
    stages = _table(*stage_columns(record, text), (0, 3))
    names, rows = top_columns(record, text)
    chances = [math.exp(candidate["logprob"]) for candidate in record["top"]]
    drawn = [candidate["id"] == record["token"] for candidate in record["top"]]
    left = tuple(i for i, name in enumerate(names) if name in ("", "token", "removed by"))
    return (
        f'<section id="t{number}"><h2>{number}. {escape(quoted(text(record["token"])))}</h2>'
        f"<p class=quiet>{escape(headline(record, text))}</p>"
        f"{stages if record['stages'] else ''}"
        f"{_table(names, rows, left, chances, drawn)}</section>"
    )


def _table(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[int],
    chances: Sequence[float] = (),
    drawn: Sequence[bool] = (),
) -> str:
    def cell(kind: str, i: int, value: str) -> str:
        return f"<{kind}{' class=left' if i in left else ''}>{escape(value)}</{kind}>"

    head = "".join(cell("th", i, name) for i, name in enumerate(names))
    body = ""
    for at, row in enumerate(rows):
        width = f"width: {100 * chances[at]:.1f}%" if chances else ""
        bar = f'<td class=bar><span style="{width}"></span></td>' if chances else ""
        mark = " class=drawn" if drawn and drawn[at] else ""
        body += f"<tr{mark}>{''.join(cell('td', i, v) for i, v in enumerate(row))}{bar}</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"

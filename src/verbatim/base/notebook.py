"""HTML for notebooks: text whose tokens are coloured by their probability.

In: the text and the log-probability of each token. Out: a fragment of HTML with inline styles, so
that it needs no style sheet and survives export.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

_BOX = "font-family:monospace;white-space:pre-wrap;line-height:1.6"
_NOTE = "font-family:sans-serif;font-size:smaller;opacity:0.7;margin-top:0.4em"


def token_span(text: str, logprob: float, title: str = "") -> str:
    """One token: green at probability 1, yellow at a half, red towards 0.

    >>> token_span("a<b", 0.0)
    '<span style="background:hsla(120,70%,50%,0.35)" title="p 100.0 %">a&lt;b</span>'
    """
    p = math.exp(min(logprob, 0.0))
    shown = html.escape(title or f"p {100 * p:.1f} %", quote=True)
    colour = f"hsla({round(120 * p)},70%,50%,0.35)"
    return f'<span style="background:{colour}" title="{shown}">{html.escape(text)}</span>'


def box(spans: Sequence[str], note: str = "") -> str:
    """Spans in one block, and a line of small text below."""
    below = f'<div style="{_NOTE}">{html.escape(note)}</div>' if note else ""
    return f'<div style="{_BOX}">{"".join(spans)}</div>{below}'

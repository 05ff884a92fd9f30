"""GET /docs: the API reference as one HTML page, made from the field tables and the OpenAPI
document. The page has no script and fetches nothing."""

from __future__ import annotations

import functools
import json
from html import escape
from typing import Any

from verbatim.server.api.common.field_rules import Rule
from verbatim.server.api.common.field_table import PROTOCOLS, QUERIES

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; font-size: 1.15rem; border-bottom: 1px solid #8885; }
code { font: 0.9em ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.6rem 0.3rem 0; }
tr + tr { border-top: 1px solid #8883; }
td:first-child { white-space: nowrap; }
.refused { opacity: 0.6; }
nav ul { columns: 2; list-style: none; padding: 0; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@functools.cache
def page(routes: tuple[tuple[str, str], ...], names: tuple[str, ...], version: str) -> str:
    """The whole page. `routes`: (path, method) pairs; `names`: the served model names."""
    shown = [(path.replace(":path", ""), path, method) for path, method in routes]
    links = "".join(
        f'<li><a href="#{_anchor(plain, method)}"><code>{method} {escape(plain)}</code></a></li>'
        for plain, _, method in shown
    )
    served = ", ".join(f"<code>{escape(name)}</code>" for name in names)
    parts = [_route(plain, path, method) for plain, path, method in shown]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Verbatim API</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}</style></head><body><h1>Verbatim API</h1>"
        f"<p>Version {escape(version)}. Model names: {served}. The same reference for programs: "
        '<a href="/openapi.json">/openapi.json</a>.</p>'
        "<p>A field that is not listed is unknown: 400, naming it. A refused field is one of the "
        "protocol that this server does not support: 400, naming it; the values in brackets have "
        "no effect and are accepted.</p>"
        f"<nav><ul>{links}</ul></nav>{''.join(parts)}</body></html>"
    )


def _anchor(plain: str, method: str) -> str:
    return escape(method.lower() + plain.translate(str.maketrans("/", "-", "{}")))


def _route(plain: str, path: str, method: str) -> str:
    out = f'<h2 id="{_anchor(plain, method)}"><code>{method} {escape(plain)}</code></h2>'
    if method == "POST" and path in PROTOCOLS:
        rows = "".join(_field(name, rule) for name, rule in PROTOCOLS[path][1].items())
        out += f"<table><tr><th>field</th><th></th><th></th></tr>{rows}</table>"
    queries: dict[str, Any] = dict(QUERIES.get(f"{method} {path}", {}))
    if queries:
        rows = "".join(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(rule.help)}</td></tr>"
            for name, rule in queries.items()
        )
        out += f"<table><tr><th>query parameter</th><th></th></tr>{rows}</table>"
    return out


def _field(name: str, rule: Rule) -> str:
    needed = " <strong>required</strong>" if rule.required else ""
    passes = f" [{', '.join(json.dumps(v) for v in rule.only)}]" if rule.only else ""
    return (
        f'<tr class="{rule.kind}"><td><code>{escape(name)}</code></td>'
        f"<td>{rule.kind}{needed}</td><td>{escape(rule.help + passes)}</td></tr>"
    )

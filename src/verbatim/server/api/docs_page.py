"""GET /docs: the API reference as one HTML page, made from the field tables and the OpenAPI
document. The page has no script and fetches nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from html import escape

from verbatim.server.api.common.field_rules import Rule
from verbatim.server.api.common.route import ApiRoute

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
def page(routes: Sequence[ApiRoute], names: tuple[str, ...], version: str) -> str:
    """The whole page. `names`: the served model names."""
    links = "".join(
        f'<li><a href="#{_anchor(route)}"><code>{_title(route)}</code></a></li>' for route in routes
    )
    served = ", ".join(f"<code>{escape(name)}</code>" for name in names)
    parts = [_section(route) for route in routes]
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


def _anchor(route: ApiRoute) -> str:
    path = route.shown_path.translate(str.maketrans("/", "-", "{}"))
    return escape(route.method.lower() + path)


def _title(route: ApiRoute) -> str:
    return f"{route.method} {escape(route.shown_path)}"


def _section(route: ApiRoute) -> str:
    out = f'<h2 id="{_anchor(route)}"><code>{_title(route)}</code></h2>'
    if route.body is not None:
        rows = "".join(_field(name, rule) for name, rule in route.fields.items())
        out += f"<table><tr><th>field</th><th></th><th></th></tr>{rows}</table>"
    if route.queries:
        pairs = [(escape(name), escape(query.help)) for name, query in route.queries.items()]
        rows = "".join(
            f"<tr><td><code>{name}</code></td><td>{text}</td></tr>" for name, text in pairs
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

"""The page of all request fields, and the tables of limits and error codes of the server."""

from __future__ import annotations

import json

from markdown_table import code, table

from verbatim.base.setting_rules import rules_of
from verbatim.server.api.common.field_rules import Rule
from verbatim.server.api.routes import BODIES, ROUTES
from verbatim.server.problem import CODES
from verbatim.server.settings import Limits

HEAD = """# Every field of every protocol

- **honoured**: has the effect that its protocol defines.
- **label**: stored with the request (log, stored object); has no effect on the tokens.
- **ignored**: cannot change the answer on this server: accepted, and listed in the answer's
  `warnings`. Values in brackets hold anyway and get no warning.
- **refused**: a field of the protocol that is not supported: 400, naming it. Values in brackets
  have no effect and are accepted.

Any other field is unknown: 400, naming it. `null` means "not given". Ranges of Verbatim's own
parameters are in [sampling.md](sampling.md).
"""

USAGE = """
## Usage fields of a response

| member of `usage` | |
|---|---|
| `prompt_tokens`, `completion_tokens`, `total_tokens` | tokens of all prompts and choices |
| `prompt_tokens_details.cached_tokens` | prompt tokens found in the prefix cache |
| `completion_tokens_details.accepted_prediction_tokens` | accepted draft tokens |
| `completion_tokens_details.rejected_prediction_tokens` | rejected draft tokens |
| `completion_tokens_details.mean_accepted_length` | mean tokens per step; 1 without drafts |
| `completion_tokens_details.saved_seconds` | time saved by drafts; negative: lost |

The Responses API calls them `input_tokens`, `output_tokens`, `output_tokens_details`. The usage
objects of `/v1/messages` and `/api/` have no fields for drafts; a response of these routes that
used drafts has `speculation`: `drafted_tokens`, `accepted_tokens`, `mean_accepted_length`,
`saved_seconds`.
"""

QUERY_HEAD = """
## Query parameters

Any other query parameter is unknown: 400, naming it. Only `/health`, `/metrics` and `/openapi.json`
ignore unknown ones.
"""


def fields_page() -> str:
    """docs/api-fields.md."""
    parts = [HEAD]
    for path, route in BODIES.items():
        rows = ((code(name), _kind(rule), _help(rule)) for name, rule in route.fields.items())
        parts.append(f"\n## POST {path}\n\n{table(('field', '', ''), rows)}")
    parts += [USAGE, QUERY_HEAD]
    for route in ROUTES:
        if route.queries:
            rows = ((code(name), query.help) for name, query in route.queries.items())
            head = f"\n### {route.method} {route.path}\n\n"
            parts.append(head + table(("parameter", ""), rows))
    return "".join(parts)


def _kind(rule: Rule) -> str:
    return f"{rule.kind} **required**" if rule.required else rule.kind


def _help(rule: Rule) -> str:
    passes = f" [{', '.join(json.dumps(v) for v in rule.only)}]" if rule.only else ""
    return (rule.help + passes).replace("|", "\\|")


def limits() -> str:
    rows = ((code(flag), str(default), *texts) for flag, default, *texts in limits_table())
    return table(("flag", "default", "bounds", "what happens"), rows)


def errors() -> str:
    rows = ((code(name), str(status), text) for name, (status, text) in CODES.items())
    return table(("code", "status", ""), rows)


def limits_table() -> list[tuple[str, str, str, str]]:
    """(flag, default, meaning, error) of every limit, for docs/serving.md."""
    return [
        (
            "--" + name.replace("_", "-"),
            f"{rule.default:g}" if isinstance(rule.default, float) else str(rule.default),
            rule.help,
            rule.error,
        )
        for name, rule in rules_of(Limits).items()
    ]

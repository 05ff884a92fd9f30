"""Tables of the documentation that are made from the code: flags, settings, parameters, metrics.

`generate(name)` returns Markdown. The code is the only source: a new flag, field or metric is on
the site with the next build.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import click

Row = tuple[str, str]
SHARED = ("Model and engine", "Sampling")  # sections of flags that many commands have


def generate(name: str) -> str:
    return GENERATORS[name]()


def _cell(text: object) -> str:
    escaped = str(text).replace("|", "\\|").replace("[", "\\[")
    return escaped.replace("<", "&lt;").replace("\n", "\\n")


def _code(text: object) -> str:
    """Inline code in a table cell: only the column separator needs an escape."""
    return "`" + str(text).replace("|", "\\|").replace("\n", "\\n") + "`"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


# --------------------------------------------------------------------------------- the command line


def _sections(command: click.Command, name: str) -> dict[str, list[Row]]:
    """Section -> (flag, help) of a command, as its --help groups them."""
    context = click.Context(
        command, info_name=f"verbatim {name}", help_option_names=["-h", "--help"]
    )
    out: dict[str, list[Row]] = {}
    for param in command.get_params(context):
        record = None if isinstance(param, click.Argument) else param.get_help_record(context)
        if record is not None:
            out.setdefault(getattr(param, "section", "Options"), []).append(record)
    return out


def _usage(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=f"verbatim {name}", max_content_width=100)
    return command.get_usage(context).removeprefix("Usage: ")


def cli() -> str:
    main = importlib.import_module("verbatim.cli.main")
    commands = {name: main.cli.get_command(None, name) for name in main.COMMANDS}
    sections = {name: _sections(command, name) for name, command in commands.items()}
    shared = {title: _common(title, sections.values()) for title in SHARED}
    out = []
    for name, command in commands.items():
        out += [f"## verbatim {name} {{#{name}}}", "", f"`{_usage(command, name)}`", ""]
        out += [inspect.cleandoc(command.help or "").replace("<", "&lt;"), ""]
        for title, rows in sections[name].items():
            if title in shared:
                out += [_difference(title, rows, shared[title]), ""]
            else:
                out += [f"**{title}**", "", _flags(rows)]
    for title, rows in shared.items():
        out += [f"## {title} flags {{#{_anchor(title)}}}", "", _flags(rows)]
    aliases = importlib.import_module("verbatim.cli.flag_aliases").FLAG_ALIASES
    out += ["## Names of other programs {#aliases}", "", "| here | also taken |", "|---|---|"]
    out += [
        f"| {_code(flag)} | {', '.join(map(_code, names))} |" for flag, names in aliases.items()
    ]
    return "\n".join([*out, ""])


def _common(title: str, commands: Iterable[dict[str, list[Row]]]) -> list[Row]:
    """The rows of a section that most of the commands which have the section share."""
    lists = [sections[title] for sections in commands if title in sections]
    longest = max(lists, key=len)
    return [row for row in longest if sum(row in rows for rows in lists) * 2 >= len(lists)]


def _difference(title: str, rows: list[Row], shared: list[Row]) -> str:
    mine, names = [row for row in rows if row not in shared], {flag for flag, _ in rows}
    missing = [flag for flag, _ in shared if flag not in names]
    text = f"And the [{title.lower()} flags](#{_anchor(title)})"
    if missing:
        text += ", except " + ", ".join(map(_code, missing))
    return text + "." + ("\n\n" + _flags(mine) if mine else "")


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-") + "-flags"


def _flags(rows: list[Row]) -> str:
    return _table(("flag", ""), ((_code(flag), _cell(text)) for flag, text in rows))


# ----------------------------------------------------------------------------- settings, parameters


def engine_config() -> str:
    from verbatim import EngineConfig
    from verbatim.cli.options import ENGINE_HELP

    rows = (
        (
            _code(field.name),
            _code(field.type),
            _code(repr(field.default)),
            _cell(ENGINE_HELP.get(field.name, "")),
        )
        for field in dataclasses.fields(EngineConfig)
    )
    return _table(("field", "type", "default", "meaning"), rows)


def sampling_params() -> str:
    from verbatim.base.params import FIELDS

    rows = []
    for name, rule in FIELDS.items():
        low = f"≥ {rule.low:g}" if rule.low is not None else ""
        low = f"> {rule.above:g}" if rule.above is not None else low
        high = f"≤ {rule.high:g}" if rule.high is not None and rule.high < 2**31 - 1 else ""
        allowed = ", ".join(filter(None, (low, high))) or ", ".join(map(repr, rule.choices))
        default = "not set" if rule.default is None else _code(repr(rule.default))
        rows.append((_code(name), _cell(rule.kind), default, _cell(allowed), _cell(rule.help)))
    return _table(("parameter", "kind", "default", "allowed", "meaning"), rows)


# ------------------------------------------------------------------------------------------ metrics


def metrics() -> str:
    """Every metric of /metrics: name, type and help, from the text that the processes render."""
    rows = ((_code(name), kind, _cell(help)) for name, (kind, help) in metric_names().items())
    return _table(("metric", "type", ""), rows)


def metric_names() -> dict[str, tuple[str, str]]:
    """Name -> (type, help). Read from the code's own metric registries and rendered texts."""
    import asyncio
    from types import SimpleNamespace

    from verbatim.observe.engine_metrics import EngineMetrics
    from verbatim.server.http_metrics import Metrics
    from verbatim.server.process import engine_process
    from verbatim.server.process.supervisor import EngineState

    async def http_text() -> str:
        metrics = Metrics()
        metrics.answered("/health", 200)
        ledger = SimpleNamespace(
            opened=0, running=0, states={"stop": 0}, usage={"prompt_tokens": 0}
        )
        engines = [({}, EngineState(waiting=0, restarts=0, up=True))]
        supervisor = SimpleNamespace(ledger=ledger, reports=0, metrics="", engines=lambda: engines)
        http = metrics.text({"model": supervisor}, 0, {"model": True})  # type: ignore[dict-item]
        return http + engine_process.tasks_text()

    bandwidth = engine_process.Bandwidth.__new__(engine_process.Bandwidth)
    bandwidth._bytes, bandwidth._limit, bandwidth._last, bandwidth._steps = 1, 1, 0.0, 0
    text = EngineMetrics().registry.render() + bandwidth.text({}) + asyncio.run(http_text())
    out: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, help = line[7:].split(" ", 1)
            out[name] = ("", help)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ", 1)
            out[name] = (kind, out[name][1])
    return dict(sorted(out.items()))


def routes() -> str:
    from verbatim.server.api.field_table import PROTOCOLS
    from verbatim.server.app import ROUTES

    rows = []
    for path, methods in ROUTES.items():
        anchor = re.sub(r"[^\w-]", "", f"post-{path}".replace(" ", "-"))
        link = f"[fields](api-fields.md#{anchor})" if path in PROTOCOLS else ""
        rows.append((_code(path.replace(":path", "")), ", ".join(methods), link))
    return _table(("route", "methods", ""), rows)


# ------------------------------------------------------------------------------------------- models


def families() -> str:
    from verbatim.model.families import _FAMILIES
    from verbatim.model.gguf_families import _ARCHITECTURES

    plain = {name.replace("_", "").replace("text", ""): name for name in _FAMILIES}
    gguf = {name.replace("-", ""): name for name in _ARCHITECTURES}
    as_llama = {"mistral", "mixtral"}  # llama.cpp writes these as general.architecture = llama
    rows = []
    for key in sorted({*plain, *gguf}):
        in_gguf = gguf.get(key) or ("llama" if key in as_llama else "")
        names = (plain.get(key), in_gguf)
        rows.append([_code(name) if name else "–" for name in names])
    return _table(("`model_type` in config.json", "`general.architecture` in GGUF"), rows)


def formats() -> str:
    from verbatim.weights.block_formats import BLOCKS

    rows = (
        (_code(name.upper()), str(values), str(size), f"{8 * size / values:.2f}")
        for name, (values, size) in BLOCKS.items()
    )
    return _table(("type", "weights per block", "bytes per block", "bits per weight"), rows)


# ---------------------------------------------------------------------------------------- documents


def _titles(folder: str) -> str:
    """Links to the numbered pages of a folder of docs/, with their titles."""
    pages = sorted((Path(__file__).parents[1] / folder).glob("0*.md"))
    titles = [page.read_text("utf-8").splitlines()[0].lstrip("# ") for page in pages]
    return "\n".join(f"- [{t}]({p.name})" for t, p in zip(titles, pages, strict=True)) + "\n"


def decisions() -> str:
    return _titles("adr")


def logs() -> str:
    return _titles("log")


# ------------------------------------------------------------------------------------- public names


def other_names() -> str:
    """Public names that no hand-written reference page shows: a new export is never missing."""
    import verbatim

    pages = [page.read_text() for page in (Path(__file__).parents[1] / "reference").glob("*.md")]
    shown = set(re.findall(r"^::: verbatim\.(\w+)", "\n".join(pages), re.MULTILINE))
    return "\n".join(
        f"::: verbatim.{name}\n"
        for name in verbatim.__all__
        if name not in shown and not name.startswith("__")
    )


def recordings() -> str:
    """The screens of docs/recordings, at both widths, one tab each. The JSON line of bench, which
    ends its output, is cut."""
    folder = Path(__file__).parents[1] / "recordings"
    out = []
    for name in ("run", "chat", "explain", "bench"):
        out.append(f"## {name}\n")
        for columns in (80, 120):
            text = (folder / f"{name}-{columns}.txt").read_text("utf-8")
            shown = text.partition('\n{"model": ')[0].rstrip() + "\n"
            block = "\n".join(f"    {line}".rstrip() for line in shown.splitlines())
            out.append(f'=== "{columns} columns"\n\n    ```text\n{block}\n    ```\n')
    return "\n".join(out)


GENERATORS: dict[str, Callable[[], str]] = {
    "recordings": recordings,
    "cli": cli,
    "engine-config": engine_config,
    "sampling-params": sampling_params,
    "metrics": metrics,
    "routes": routes,
    "families": families,
    "formats": formats,
    "decisions": decisions,
    "logs": logs,
    "other-names": other_names,
}

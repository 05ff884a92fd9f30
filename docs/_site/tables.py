"""What the documentation shows of the code: flags, settings, parameters, metrics, whole pages.

A line "Made from the code by `make docs`: NAME" of a page stands for the table, or the whole page,
of that name. They are made when the site is built, and nothing made is in git.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import click
import name_tables
from markdown_table import cell, code, codes, table

Row = tuple[str, str]
SHARED = ("Model and engine", "Sampling")  # sections of flags that many commands have


DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
MADE = "*Made from the code by `make docs`: "
PART = re.compile(rf"^{re.escape(MADE)}([\w-]+)\*$", re.MULTILINE)
# Folders of the modules that make pages and tables; MkDocs restores sys.path after it loads a hook.
FOLDERS = [str(ROOT / name) for name in ("docs/_site", "tests", "tests/parity", "tests/sampling")]


@cache
def generate(name: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", GENERATORS[name]().strip())


def filled(text: str) -> str:
    """A page with its tables."""
    return PART.sub(lambda match: f"\n{generate(match[1])}\n", text)


@cache
def page(name: str) -> str:
    """The whole text of a page of docs/."""
    return filled((DOCS / name).read_text("utf-8"))


def config_keys() -> str:
    import key_tables

    return key_tables.document()


def model_parity() -> str:
    import models_doc  # in tests/parity: the table is made from the test cases

    return models_doc.document()


def api_fields() -> str:
    import server_tables

    return server_tables.fields_page()


# --------------------------------------------------------------------------------- the command line


def _sections(command: click.Command, name: str) -> dict[str, list[Row]]:
    """Section -> (flag, help) of a command, as its --help groups them."""
    context = click.Context(command, info_name=f"verbatim {name}")
    out: dict[str, list[Row]] = {}
    for param in command.params:  # without --help, which every command has
        record = None if isinstance(param, click.Argument) else param.get_help_record(context)
        if record is not None:
            out.setdefault(getattr(param, "section", "Options"), []).append(record)
    return out


def _usage(command: click.Command, name: str) -> str:
    context = click.Context(command, info_name=f"verbatim {name}", terminal_width=200)
    return " ".join(command.get_usage(context).removeprefix("Usage: ").split())


def commands() -> dict[str, click.Command]:
    """Name -> command, with the subcommands of a command after it (`models show`)."""
    main = importlib.import_module("verbatim.cli.main")
    out: dict[str, click.Command] = {}
    for name in main.COMMANDS:
        out[name] = main.cli.get_command(None, name)
        for child, command in getattr(out[name], "commands", {}).items():
            out[f"{name} {child}"] = command
    return out


def cli() -> str:
    sections = {name: _sections(command, name) for name, command in commands().items()}
    shared = {title: _common(title, sections.values()) for title in SHARED}
    out = []
    for name, command in commands().items():
        out += [f"## verbatim {name}", "", f"`{_usage(command, name)}`", ""]
        out += [inspect.cleandoc(command.help or "").replace("<", "&lt;"), ""]
        for title, rows in sections[name].items():
            if title in shared:
                out += [_difference(title, rows, shared[title]), ""]
            else:
                out += [f"**{title}**", "", _flags(rows)]
    for title, rows in shared.items():
        out += [f"## {title} flags", "", _flags(rows)]
    return "\n".join([*out, *_names_of_other_programs()])


def _names_of_other_programs() -> list[str]:
    aliases = importlib.import_module("verbatim.cli.lib.flag_aliases")
    here = ("here", "also taken")
    names: dict[str, list[str]] = {}
    for alias, words in aliases.COMMAND_ALIASES.items():
        names.setdefault(" ".join(words), []).append(alias)
    return [
        "## Names of other programs",
        "",
        "Commands and flags of Ollama, llama.cpp, vLLM and transformers that work here too:",
        "",
        table(here, ((code(f"verbatim {name}"), codes(also)) for name, also in names.items())),
        table(here, ((code(flag), codes(also)) for flag, also in aliases.FLAG_ALIASES.items())),
        "Those without a counterpart are an error that names what to type instead:",
        "",
        table(
            ("not here", "the answer"),
            [
                *((code(f"verbatim {n}"), cell(t)) for n, t in aliases.COMMAND_ANSWERS.items()),
                *((codes(names), cell(t)) for names, t in aliases.FLAG_ANSWERS.items()),
            ],
        ),
    ]


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
        text += f", except {codes(missing)}"
    text = textwrap.fill(text + ".", 100, break_long_words=False, break_on_hyphens=False)
    return text + ("\n\n" + _flags(mine) if mine else "")


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-") + "-flags"


def _flags(rows: list[Row]) -> str:
    return table(("flag", ""), ((code(flag), cell(text)) for flag, text in rows))


# ----------------------------------------------------------------------------- settings, parameters


def engine_config() -> str:
    from verbatim.base.config import SETTINGS, TYPES

    rows = (
        (code(name), code(TYPES[name]), code(repr(rule.default)), cell(rule.help))
        for name, rule in SETTINGS.items()
    )
    return table(("field", "type", "default", "meaning"), rows)


def sampling_params() -> str:
    from verbatim.base.params import FIELDS

    rows = []
    for name, rule in FIELDS.items():
        low = f"≥ {rule.low:g}" if rule.low is not None else ""
        low = f"> {rule.above:g}" if rule.above is not None else low
        high = f"≤ {rule.high:g}" if rule.high is not None and rule.high < 2**31 - 1 else ""
        allowed = ", ".join(filter(None, (low, high))) or ", ".join(map(repr, rule.choices))
        default = "not set" if rule.default is None else code(repr(rule.default))
        rows.append((code(name), cell(rule.kind), default, cell(allowed), cell(rule.help)))
    return table(("parameter", "kind", "default", "allowed", "meaning"), rows)


# ------------------------------------------------------------------------------------------ metrics


def metrics() -> str:
    """Every metric of /metrics: name, type and help, from the text that the processes render."""
    rows = ((code(name), kind, cell(help)) for name, (kind, help) in metric_names().items())
    return table(("metric", "type", ""), rows)


def metric_names() -> dict[str, tuple[str, str]]:
    """Name -> (type, help). Read from the code's own metric registries and rendered texts."""
    import asyncio
    from types import SimpleNamespace

    from verbatim.base.records import Usage
    from verbatim.observe.engine_metrics import EngineMetrics
    from verbatim.scale import cluster
    from verbatim.server.http_metrics import Metrics
    from verbatim.server.process import engine_process
    from verbatim.server.process.supervisor import EngineState

    async def http_text() -> str:
        metrics = Metrics()
        metrics.answered("/v1/models", 200, "alice")
        metrics.used("alice", Usage(1, 1))
        ledger = SimpleNamespace(
            opened=0, running=0, states={"stop": 0}, usage={"prompt_tokens": 0}
        )
        engines = [({}, EngineState(waiting=0, restarts=0, up=True))]
        supervisor = SimpleNamespace(ledger=ledger, reports=0, metrics="", engines=lambda: engines)
        http = metrics.text({"model": supervisor}, 0, 0, {"model": True})  # type: ignore[dict-item]
        return http + engine_process.tasks_text()

    bandwidth = engine_process.Bandwidth.__new__(engine_process.Bandwidth)
    bandwidth._bytes, bandwidth._limit, bandwidth._last, bandwidth._steps = 1, 1, 0.0, 0
    service = SimpleNamespace(routing=lambda: dict.fromkeys(cluster.ROUTER_HELP, 0))
    router = SimpleNamespace(_service=service, _reports={})
    text = EngineMetrics().registry.render() + bandwidth.text({}) + asyncio.run(http_text())
    text += cluster.Cluster._router_text(router)  # type: ignore[arg-type]
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
    from verbatim.server.api.routes import BODIES, ROUTES

    methods: dict[str, list[str]] = {}
    for route in ROUTES:
        methods.setdefault(route.path, []).append(route.method)
    rows = []
    for path, names in methods.items():
        anchor = re.sub(r"[^\w-]", "", f"post-{path}".replace(" ", "-"))
        link = f"[fields](api-fields.md#{anchor})" if path in BODIES else ""
        rows.append((code(path.replace(":path", "")), ", ".join(names), link))
    return table(("route", "methods", ""), rows)


def limits() -> str:
    import server_tables

    return server_tables.limits()


def errors() -> str:
    import server_tables

    return server_tables.errors()


def modes() -> str:
    """Every sampling parameter in every mode, found by running them."""
    import parameter_modes  # in tests/sampling

    head, *rows = parameter_modes.mode_table()
    return table(head, rows)


def diffusion_modes() -> str:
    """Every sampling parameter on diffusion models, found by running them."""
    import parameter_modes  # in tests/sampling

    head, *rows = parameter_modes.diffusion_table()
    return table(head, [(code(row[0]), *row[1:]) for row in rows])


# ------------------------------------------------------------------------------------------- models


def families() -> str:
    from verbatim.model.families import FAMILIES

    rows = [
        (code(name), code(family.gguf_architecture) if family.gguf_architecture else "–")
        for name, family in FAMILIES.items()
    ]
    return table(("`model_type` in config.json", "`general.architecture` in GGUF"), rows)


def formats() -> str:
    from verbatim.formats.registry import BLOCKS, FORMATS

    rows = []
    for name, (values, size) in BLOCKS.items():
        gpu = FORMATS[name].gpu
        own = f"{gpu.bits + 8 * gpu.scale_bytes / gpu.group:.2f}" if gpu else ""
        rows.append((code(name.upper()), str(values), str(size), f"{8 * size / values:.2f}", own))
    names = "type", "weights per block", "bytes per block", "bits per weight", "in a GPU's blocks"
    return table(names, rows)


# ---------------------------------------------------------------------------------------- documents


def refused_adapters() -> str:
    """Modules whose LoRA is refused -> the model types that have them."""
    from verbatim.lora.adapter_load import refused_modules
    from verbatim.testing.tiny_models import TINY_CONFIGS, tiny_model

    found: dict[str, list[str]] = {}
    for family, config in TINY_CONFIGS.items():
        for kind in dict.fromkeys(refused_modules(tiny_model(family).spec).values()):
            names = found.setdefault(kind, [])
            names += [] if config["model_type"] in names else [config["model_type"]]
    rows = ["| module | `model_type` |", "|---|---|"]
    for kind, names in found.items():
        text = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| `{kind}` | {text if len(names) < 12 else 'most families'} |")
    return "\n".join(rows)


def gpu_measured() -> str:
    """The table of docs/gpu.md, so that the page of benchmarks has every machine."""
    text = (DOCS / "gpu.md").read_text("utf-8").partition("\n## Measured\n")[2]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows is not None
    return rows[0]


def _titles(folder: str) -> str:
    """Links to the numbered pages of a folder of docs/, with their titles."""
    pages = sorted((DOCS / folder).glob("0*.md"))
    titles = [page.read_text("utf-8").splitlines()[0].lstrip("# ") for page in pages]
    return "\n".join(f"- [{t}]({p.name})" for t, p in zip(titles, pages, strict=True)) + "\n"


def decisions() -> str:
    return _titles("adr")


def logs() -> str:
    return _titles("log")


def recordings() -> str:
    """The screens of docs/recordings, at both widths. The JSON line of bench, which ends its
    output, is cut."""
    out = []
    for name in ("run", "chat", "explain", "bench"):
        for columns in (80, 120):
            text = (DOCS / "recordings" / f"{name}-{columns}.txt").read_text("utf-8")
            shown = text.partition('\n{"model": ')[0].rstrip()
            block = "\n".join(line.rstrip() for line in shown.splitlines())
            out.append(f"## {name}, {columns} columns\n\n```text\n{block}\n```\n")
    return "\n".join(out)


GENERATORS: dict[str, Callable[[], str]] = {
    "api-fields": api_fields,
    "config-keys": config_keys,
    "model-parity": model_parity,
    "recordings": recordings,
    "cli": cli,
    "engine-config": engine_config,
    "sampling-params": sampling_params,
    "metrics": metrics,
    "routes": routes,
    "families": families,
    "formats": formats,
    "gpu-measured": gpu_measured,
    "decisions": decisions,
    "logs": logs,
    "public-names": name_tables.public_names,
    "methods": name_tables.methods,
    "records": name_tables.records,
    "other-names": name_tables.other_names,
    "refused-adapters": refused_adapters,
    "limits": limits,
    "errors": errors,
    "modes": modes,
    "diffusion-modes": diffusion_modes,
}

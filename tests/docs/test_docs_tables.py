"""The tables and pages of docs/ that are made from the code are complete, links lead somewhere, and
every picture has its maker."""

from __future__ import annotations

import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest

from verbatim.cli import main as cli_main
from verbatim.cli.lib import flag_aliases

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "verbatim"
sys.path.insert(0, str(ROOT / "docs" / "_site"))

import tables  # noqa: E402

sys.path += tables.FOLDERS


# Seconds of runs, which tests/sampling/test_sampling_table.py makes.
MADE_BY_RUNS = ("modes", "diffusion-modes")


@pytest.mark.parametrize("name", tables.GENERATORS)
def test_every_table_is_made_and_on_one_page(name: str) -> None:
    if name not in MADE_BY_RUNS:
        assert tables.generate(name) or name == "other-names"  # empty: every name has its page
    pages = [page for page in (ROOT / "docs").rglob("*.md") if name in parts_of(page)]
    assert len(pages) == 1


def parts_of(page: Path) -> list[str]:
    return tables.PART.findall(page.read_text("utf-8"))


def test_every_part_of_a_page_has_a_generator() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.read_text("utf-8").count(tables.MADE) == len(parts_of(page)), page
        assert set(parts_of(page)) <= set(tables.GENERATORS), page


def walk(command: click.Command, path: str) -> dict[str, click.Command]:
    """Path -> command, for a command and everything below it."""
    out = {path: command}
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), name)
            assert child is not None
            out |= walk(child, f"{path} {name}")
    return out


def test_every_command_has_its_section_with_its_own_flags() -> None:
    """Flags that many commands share are in tables of their own at the end."""
    parts = re.split(r"^## (.*)$", tables.page("cli.md"), flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    shared = "".join(text for title, text in sections.items() if title.endswith(" flags"))
    found = walk(cli_main.cli, "verbatim")
    assert "verbatim models show" in found
    for path, command in found.items():
        if path == "verbatim":
            continue
        text = sections[path]
        for param in command.params:  # without --help, which every command has
            if isinstance(param, click.Option) and not param.hidden:
                where = text + shared if getattr(param, "section", "") in tables.SHARED else text
                aliases = getattr(param, "aliases", [])
                for flag in {*param.opts, *param.secondary_opts} - {*aliases}:
                    assert re.search(rf"`[^`]*{re.escape(flag)}(?![\w-])", where), f"{path} {flag}"


def test_every_name_of_other_programs_is_shown() -> None:
    text = tables.page("cli.md")
    part = text[text.index("## Names of other programs") :]
    for flag, also in flag_aliases.FLAG_ALIASES.items():
        assert all(f"`{name}`" in part for name in (flag, *also)), flag
    for name, words in flag_aliases.COMMAND_ALIASES.items():
        assert f"`{name}`" in part, name
        assert f"`verbatim {' '.join(words)}`" in part, name
    for names in flag_aliases.FLAG_ANSWERS:
        assert all(f"`{name}`" in part for name in names), names
    for name in flag_aliases.COMMAND_ANSWERS:
        assert f"`verbatim {name}`" in part, name


@pytest.mark.parametrize("page", ["llama-cpp.md", "vllm.md"])
def test_every_flag_of_another_engine_on_its_page_is_accepted_or_answered(page: str) -> None:
    """Both in the table of flags and in the commands shown: an error must name ours."""
    text = (ROOT / "docs" / "coming-from" / page).read_text("utf-8")
    cells = re.findall(r"^\| (.*?) \|", text[text.index("## Flags") :], re.M)
    code = [part for cell in cells for part in re.findall(r"`([^`]+)`", cell)]
    code += re.findall(r"^(?:llama-(?:cli|server|completion)|vllm serve) .*$", text, re.M)
    theirs = {flag for part in code for flag in re.findall(r"(?:^| )(--?[a-z][\w-]*)", part)}
    assert len(theirs) > 12
    known = {name for names in flag_aliases.FLAG_ANSWERS for name in names}
    for command in walk(cli_main.cli, "verbatim").values():
        known |= {name for param in command.params for name in param.opts}
    assert theirs <= known, theirs - known


def test_every_module_that_makes_metrics_is_on_the_page() -> None:
    """The page renders the metrics of these modules; a new one must be added to tables.py. What a
    running server serves is compared with the page in test_docs_site.py."""
    makers = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        if re.search(r"engine_metrics import .*Registry|# TYPE ", path.read_text("utf-8"))
    }
    assert makers == {
        "observe/engine_metrics.py",
        "observe/merge_metrics.py",  # adds a label to the texts of others
        "scale/cluster.py",
        "server/http_metrics.py",
        "server/process/engine_process.py",
    }
    from verbatim.scale.cluster import ROUTER_HELP

    text = tables.page("operations.md")
    for name in ("verbatim_replicas", *(f"verbatim_router_{n}_total" for n in ROUTER_HELP)):
        assert f"| `{name}` |" in text, name


def test_make_pictures_makes_every_picture_that_a_page_shows() -> None:
    import pictures

    patterns = [pattern for pattern, _ in pictures.PICTURES.values()]
    shown = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)", page.read_text("utf-8")):
            path = (page.parent / target).resolve()
            assert path.is_file(), f"{page.name}: {target}"
            shown.add(path.relative_to(ROOT / "docs").as_posix())
    assert len(shown) > 10
    assert [name for name in shown if not any(fnmatch(name, p) for p in patterns)] == []


def test_prose_has_at_most_100_columns() -> None:
    """Tables, code, pictures, definitions of links and generated parts may be wider."""
    wide = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = tables.PART.sub("", page.read_text("utf-8"))
        text = re.sub(r"^( *)```.*?^\1```|<!--.*?-->", "", text, flags=re.M | re.S)
        lines = [line for line in text.splitlines() if not re.match(r"\||!?\[|- \[", line)]
        wide += [f"{page.name}: {line}" for line in lines if len(line) > 100]
    assert wide == []


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 150
    for number, line in enumerate(lines, 1):
        assert len(line) <= 100 or line.startswith("|"), f"README.md:{number}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as MkDocs makes them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    found: list[str] = re.findall(r'<a (?:id|name)="([^"]+)"', text)
    for title in re.findall(r"^#+ (.*)$", text, re.M):
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        words = re.sub(r"[^\w\s-]", "", title).strip().lower()
        found.append(re.sub(r"[-\s]+", "-", words))
    return set(found)


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    """In the pages as the site shows them; test_docs_site.py checks the built site."""
    pages = {
        ROOT / name: (ROOT / name).read_text("utf-8")
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    }
    for path in ROOT.glob("docs/**/*.md"):
        text = path.read_text("utf-8")
        for name in MADE_BY_RUNS:  # they have no link
            text = text.replace(f"{tables.MADE}{name}*", "")
        pages[path] = tables.filled(text)
    broken, known = [], {page: anchors(text) for page, text in pages.items()}
    for page, content in pages.items():
        text = re.sub(r"^```.*?^```", "", content, flags=re.M | re.S)
        for address in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
            if re.match(r"[a-z]+:", address):
                continue
            file, _, anchor = address.partition("#")
            target = (page.parent / file).resolve() if file else page
            found = target.exists() or target in known
            if not found or (anchor and anchor not in known.get(target, {anchor})):
                broken.append(f"{page.relative_to(ROOT)}: {address}")
    assert len(known) > 30
    assert not broken

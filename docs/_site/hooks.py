"""MkDocs hooks of the documentation site.

Pages come in as Markdown; three things change before MkDocs renders them:

- Tables and pages that are made from the code (tables.py) are put in.
- `<!-- ::: verbatim.NAME -->` becomes the entry of mkdocstrings. It is a comment in the file, so
  that a reader of the file sees the tables beside it and no directive.
- A link that leaves docs/ (README.md, a source file) points to a page that is generated here from
  that file, so that the site is complete without a network.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# File of the repository -> page of the site, made from it.
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-tests.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "docs/README.md": "documents.md",
}
LANGUAGES = {
    ".py": "python",
    ".cpp": "cpp",
    ".h": "cpp",
    ".inc": "cpp",
    ".json": "json",
    ".txt": "text",
    ".toml": "toml",
    ".yml": "yaml",
}
# Histories of the project: a search finds the guides first.
HISTORY = ("adr/", "log/", "changelog.md", "roadmap.md")
HISTORY_BOOST = 0.0001  # with 0.01 "grammar" still found a decision's title first
ENTRY = re.compile(r"^<!-- (::: .*?) -->$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    sys.path += tables.FOLDERS
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from files outside docs/."""
    for name, page in ROOT_PAGES.items():
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    for target in sorted(_linked_sources(config)):
        content = _source_page(target)
        files.append(File.generated(config, _source_name(target), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    if here.startswith(HISTORY):
        page.meta.setdefault("search", {"boost": HISTORY_BOOST})
    home = next((name for name, made in ROOT_PAGES.items() if made == here), f"docs/{here}")

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(home), match[1]))
        made = _site_target(target)
        return posixpath.relpath(made, posixpath.dirname(here) or ".") + (match[2] or "")

    text = ENTRY.sub(lambda match: match[1], tables.filled(markdown))
    return _outside_code(text, lambda part: LINK.sub(link, part))


def _outside_code(text: str, change: Any) -> str:
    """Apply `change` to the text between fenced code blocks."""
    out, end = [], 0
    for fence in FENCE.finditer(text):
        out += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*out, change(text[end:])])


def _linked_sources(config: MkDocsConfig) -> set[str]:
    """Files of the repository that a page links to and that are not pages themselves."""
    found = set()
    for page in [*Path(config.docs_dir).rglob("*.md"), *(ROOT / name for name in ROOT_PAGES)]:
        for match in LINK.finditer(FENCE.sub("", page.read_text("utf-8"))):
            target = (page.parent / match[1]).resolve()
            if target.is_relative_to(ROOT):
                name = target.relative_to(ROOT).as_posix()
                if _site_target(name) == _source_name(name):
                    found.add(name)
    return found


def _site_target(target: str) -> str:
    """The page of the site for a file of the repository."""
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    if target.startswith("docs/") and not target.startswith("docs/_site/"):
        return target[5:]
    return _source_name(target)


def _source_name(target: str) -> str:
    return f"source/{target.rstrip('/')}.md"


def _source_page(target: str) -> str:
    """A file with its syntax highlighted, or the list of a folder; not in the search index."""
    path = ROOT / target
    head = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# {target}\n\n"
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if not child.name.startswith("_"))
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = LANGUAGES.get(path.suffix, "text")
    return f"{head}`````{language} linenums='1'\n{path.read_text('utf-8')}`````\n"

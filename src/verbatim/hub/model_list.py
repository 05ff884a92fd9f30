"""List the models of the catalog and of the hub's cache, find one by name, delete one.

In: a name, or nothing. Out: ModelRecords. Nothing is downloaded, and no file outside the caches is
deleted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from verbatim.base.errors import ModelError
from verbatim.files.split import group_parts, with_siblings
from verbatim.hub.catalog import CATALOG, catalog_path, home_dir, hub_name, is_complete
from verbatim.hub.hub_catalog import HUB_CATALOG, catalog_name


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One line of `verbatim models`."""

    name: str
    path: Path
    bytes: int
    kind: str  # gguf | safetensors
    ready: bool  # on this machine and complete
    note: str = ""
    # what the catalog knows about a model that is not here yet
    family: str = ""
    quant: str = ""
    context: int = 0
    licence: str = ""


def list_models() -> list[ModelRecord]:
    """All catalog models, downloaded or not, then the other models in the hub's cache."""
    records = []
    for entry in CATALOG.values():
        path = catalog_path(entry)
        own = (entry.name, path, entry.size, "gguf", is_complete(path, entry), entry.note)
        records.append(ModelRecord(*own, "llama", "q4_1", 8192, "Apache-2.0"))
    cached = {record.name: record for record in _hub_records()}
    for name, known in HUB_CATALOG.items():
        kind = "gguf" if known.file else "safetensors"
        absent = ModelRecord(name, Path(), known.size, kind, ready=False)
        here = cached.pop(known.name, absent)
        own = (name, here.path, here.bytes, kind, here.ready, known.repo)
        records.append(ModelRecord(*own, *known.facts))
    return records + list(cached.values())


def remove(model: str) -> tuple[list[Path], int]:
    """Delete a downloaded model from the cache. (files, bytes freed). A path is never deleted."""
    record = find_record(model)
    if record is None or record.path == Path() or not (record.ready or record.path.exists()):
        raise ModelError(f"{model} is not in the cache; `verbatim models` lists what is")
    if record.kind == "gguf":
        files = with_siblings(record.path)
    else:
        # GGUF files of the same repository are models of their own
        files = [f for f in record.path.rglob("*") if not f.is_dir() and f.suffix != ".gguf"]
    data = {file.resolve() for file in files if file.exists() and _is_own_data(file)}
    data -= _needed_elsewhere(files)
    freed = sum(one.stat().st_size for one in data)
    try:
        for file in {*files, *data}:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"cannot be deleted: {error.strerror}", file=str(record.path)) from error
    for folder in sorted({p for file in files for p in list(file.parents)[:3]}, reverse=True):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    return sorted(files), freed


def _is_own_data(file: Path) -> bool:
    """Whether the data of this file is in the folder of its model: not a link of the user's to a
    file elsewhere, or of a tool that shares equal data between repositories."""
    snapshots = next((p for p in file.parents if p.name == "snapshots"), None)
    own = [file.parent] if snapshots is None else [snapshots.parent, snapshots.parent / "blobs"]
    return any(file.resolve().is_relative_to(folder.resolve()) for folder in own)


def _needed_elsewhere(files: Collection[Path]) -> set[Path]:
    """The data of links in the snapshots of the same repository that are not in `files`. Revisions
    share the data of equal files."""
    found: set[Path] = set()
    for snapshots in {p for file in files for p in file.parents if p.name == "snapshots"}:
        links = (file for file in snapshots.rglob("*") if file.is_symlink())
        found |= {link.resolve() for link in links if link not in files}
    return found


def find_record(model: str) -> ModelRecord | None:
    """The line of `verbatim models` with this name."""
    model = catalog_name(model)
    names = {model, hub_name(model)}
    return next((record for record in list_models() if record.name in names), None)


def hub_cache() -> Path | None:
    """The folder of the hub's cache, by the variables that huggingface_hub reads. None: no variable
    names one, and this user has no home directory."""
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    try:
        if not folder:
            home = os.environ.get("HF_HOME") or Path(
                os.environ.get("XDG_CACHE_HOME") or home_dir() / ".cache", "huggingface"
            )
            folder = f"{home}/hub"
        return Path(os.path.expandvars(folder)).expanduser()
    except (ModelError, RuntimeError):
        return None


def _hub_records() -> Iterator[ModelRecord]:
    """Models in the hub's cache, found by its layout (models--org--name/snapshots/revision).

    Works without huggingface_hub."""
    root = hub_cache()
    if root is None:
        return
    for snapshot in sorted(root.glob("models--*--*/snapshots/*")):
        name = snapshot.parts[-3].removeprefix("models--").replace("--", "/", 1)
        if snapshot.name != _text(snapshot.parent.parent / "refs" / "main"):
            name += f"@{snapshot.name}"
        found = snapshot.glob("*.safetensors")
        weights = [file for file in found if not file.name.startswith("consolidated")]
        if weights and (snapshot / "config.json").exists():
            size, complete = _sizes(weights)
            yield ModelRecord(name, snapshot, size, "safetensors", complete)
        files = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*.gguf")]
        for file, parts in group_parts(files).items():
            size, complete = _sizes([snapshot / part for part in parts])
            present = sum((snapshot / part).exists() for part in parts)
            here = (
                f"{len(parts)} parts" if complete else f"{present} of {len(parts)} parts are here"
            )
            note = here if len(parts) > 1 else ""
            yield ModelRecord(f"{name}:{file}", snapshot / file, size, "gguf", complete, note)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def _sizes(files: list[Path]) -> tuple[int, bool]:
    """Total bytes of the files, and whether all exist: links of a snapshot may be broken."""
    total, complete = 0, True
    for file in files:
        try:
            total += file.stat().st_size
        except OSError:
            complete = False
    return total, complete

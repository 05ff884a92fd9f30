"""Errors of the command line: an exception comes in; one line on stderr and an exit code go out."""

from __future__ import annotations

import errno
import os
import re
import sys

import click

from verbatim.base.errors import MAIN_MEMORY, BackendError, ModelError, RequestError, VerbatimError
from verbatim.cli.lib.interrupt import INTERRUPTED
from verbatim.cli.lib.terminal import wrapped

OK, FAILED, USAGE, MODEL, BROKEN_PIPE = 0, 1, 2, 3, 141


def report(error: BaseException) -> int:
    """Print the error as one line on stderr; returns the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        print_error("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    if isinstance(error, click.ClickException):
        print_error(_usage_line(error))
        return error.exit_code if error.exit_code != 1 else USAGE
    if isinstance(error, VerbatimError):
        print_error(error.message)
        return exit_code_of(error)
    if isinstance(error, MemoryError):
        print_error(MAIN_MEMORY)
        return FAILED
    if isinstance(error, OSError) and error.errno in OS_REMEDIES:
        print_error(_system_line(error))
        return FAILED
    print_error(f"{type(error).__name__}: {error}; this is a bug in Verbatim; --debug shows where")
    return FAILED


# Errors of the operating system that no program can avoid -> the remedy.
OS_REMEDIES = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or write elsewhere",
    errno.EIO: "check the device behind it",
    errno.EROFS: "choose a writable path",
    errno.EACCES: "check its permissions, or choose another path",
    errno.EPERM: "check its permissions, or choose another path",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close some programs: the system's limit on open files is reached",
}
# A ModelError with one of these causes comes from writing a file; the model itself is sound.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def _system_line(error: OSError) -> str:
    """The line for an OSError. Without a file name it comes from an open stream: the output."""
    what = "write the output" if error.filename is None else f"use {os.fspath(error.filename)!r}"
    reason = (error.strerror or "failed").lower()
    return f"cannot {what}: {reason}; {OS_REMEDIES[error.errno or 0]}"


def missing_extra(what: str, error: ImportError) -> BackendError:
    """The error for a package of the extra 'server' that is not installed."""
    remedy = "install the extra 'server': pip install '.[server]' in the checkout"
    return BackendError(f"{what} needs {error.name}; {remedy}")


def exit_code_of(error: VerbatimError) -> int:
    if isinstance(error, RequestError):
        return USAGE
    if isinstance(error, ModelError) and getattr(error.__cause__, "errno", None) not in DISK_ERRORS:
        return MODEL
    return FAILED


def _usage_line(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    meant = r"[.;]? \(?[Dd]id you mean (?:one of: )?(.*?)\??\)?$"
    text = re.sub(meant, r"; did you mean \1?", text)
    ctx = getattr(error, "ctx", None)
    if ctx is not None and "; " not in text:
        text += f"; see {ctx.command_path} --help"
    return text[0].lower() + text[1:] if text[:2].istitle() else text


def print_error(message: str) -> None:
    """Print one line on stderr, wrapped between words on a terminal. Newlines become spaces: a file
    name may contain one, and errors of libraries may have several."""
    line = " ".join(str(message).split())
    try:
        sys.stderr.write(wrapped(f"verbatim: {line}") + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):  # stderr is closed
        pass

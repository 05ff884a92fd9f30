"""Ctrl-C while Python imports modules or a model loads: the process exits at once, with code 130.

Python may drop a KeyboardInterrupt that is raised in its import system, or raise it while the
import lock is held. The lock is then never released, and a load that imports in a second thread
hangs. Both phases need no clean-up: the next download removes what an unfinished one left.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Never

INTERRUPTED = 130


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Exit on Ctrl-C in this block. A handler of the caller (a Python program that calls main) and
    a SIGINT that the shell ignores (`verbatim … &`) are left alone."""
    default = signal.default_int_handler
    if signal.getsignal(signal.SIGINT) is not default or not _in_main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)


def _in_main_thread() -> bool:  # the only one that may set a handler
    return threading.current_thread() is threading.main_thread()


def _exit(signum: int, frame: object) -> Never:
    with suppress(Exception):  # a closed stdout, or one that is being flushed
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, b"\nverbatim: interrupted\n")
    os._exit(INTERRUPTED)

"""DiskCache: KV blocks of prompts in files, so that a prefix hit survives a restart.

In: blocks that the prefix cache publishes. Out: their bytes, when a later engine with the same
fingerprint looks up the same prefix. A loaded block has the bits that were stored, so the cache
changes the time to the first token and never a token.

    DIR/key                             the key of the block hashes, 32 random bytes, mode 0600
    DIR/IDENTITY/ab/abcd….0             a block of group 0: checksum, then the block's bytes

IDENTITY is a digest of the fingerprint and of the block layout; a file of another model, backend or
numerics version is therefore never found. A file is written under a temporary name, then renamed.
The checksum covers the name and the bytes: a torn, damaged or renamed file is
deleted and its block is computed again. Writing happens on one background thread, with at most
QUEUE_BYTES waiting; further blocks are dropped and stored by a later request with that prefix.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import secrets
import threading
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from verbatim.backend.protocol import Backend
from verbatim.base.errors import ParameterError

log = logging.getLogger("verbatim")

QUEUE_BYTES = 256 << 20  # bytes that wait to be written
CHECKSUM = 16  # bytes
KEY = 32  # bytes
OWN_FILE = re.compile(
    r"[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{32}\.[0-9]+(?P<partial>\.[0-9a-f]{8}\.partial)?"
)


class DiskCache:
    """schedule.block_store.BlockStore over a directory. One engine thread calls it.

    The limit counts every file that the engine found when it started, those of other models
    included, and every file that it wrote."""

    def __init__(self, directory: str, identity: str, backend: Backend, max_bytes: int) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
        self._root = Path(directory).expanduser()
        self._identity = blake2b(identity.encode(), digest_size=16).hexdigest()
        try:
            (self._root / self._identity).mkdir(mode=0o700, parents=True, exist_ok=True)
            self.key = _read_or_make_key(self._root / "key")
            # path below the root -> bytes; least recently used first
            self._files = OrderedDict(_scan(self._root))
        except OSError as error:
            raise ParameterError(
                "cache_dir",
                f"cannot use {directory!r}: {error.strerror or error}; choose another directory",
            ) from None
        self._lock = threading.Lock()  # guards the members below, and _files
        self._bytes = sum(self._files.values())
        self._queued: dict[str, int] = {}  # blocks that wait to be written, and their bytes
        self._usable = True
        self.loaded = self.stored = self.dropped = self.damaged = 0  # blocks
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._evict()

    def counts(self) -> dict[str, float]:
        """The metrics of the cache. Safe to call from any thread."""
        return {
            "disk_cache_bytes": self._bytes,
            "disk_cache_loaded_total": self.loaded,
            "disk_cache_stored_total": self.stored,
            "disk_cache_dropped_total": self.dropped,
            "disk_cache_damaged_total": self.damaged,
        }

    # ------------------------------------------------------------------------------ BlockStore

    def has(self, group: int, block_hash: bytes) -> bool:
        return self._name(group, block_hash) in self._files

    def load(self, group: int, block_hash: bytes, block: int) -> bool:
        name = self._name(group, block_hash)
        path = self._root / name
        try:
            data = path.read_bytes()
            if data[:CHECKSUM] != _checksum(name, data[CHECKSUM:]):
                raise ValueError("wrong checksum")
            self._backend.write_block(group, block, data[CHECKSUM:])
        except (OSError, ValueError) as error:
            self._forget(name, error)
            return False
        with suppress(OSError):
            os.utime(path)  # the next engine reads the order of use from the times
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
            self.loaded += 1
        return True

    def save(self, group: int, block_hash: bytes, block: int) -> None:
        name = self._name(group, block_hash)
        with self._lock:
            if not self._usable or name in self._files or name in self._queued:
                return
            if sum(self._queued.values()) >= QUEUE_BYTES:
                self.dropped += 1
                return
        data = self._backend.read_block(group, block)
        with self._lock:
            self._queued[name] = len(data)
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_all, name="verbatim-disk-cache", daemon=True
            )
            self._writer.start()
        self._queue.put((name, data))

    def drop(self, group: int, block_hash: bytes) -> None:
        self.flush()  # it may wait to be written
        name = self._name(group, block_hash)
        with self._lock:
            self._bytes -= self._files.pop(name, 0)
        with suppress(OSError):
            (self._root / name).unlink()

    def flush(self) -> None:
        """Wait until every queued block is written."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join()
            self._writer = None

    # ---------------------------------------------------------------------------------- files

    def _name(self, group: int, block_hash: bytes) -> str:
        text = block_hash.hex()
        return f"{self._identity}/{text[:2]}/{text}.{group}"

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            name, data = item
            try:
                if self._usable:
                    self._write(name, data)
            except FileNotFoundError:  # another process has cleared the directory
                self.dropped += 1
            except OSError as error:  # a full or read-only disk: go on without storing
                self._usable = False
                log.warning("cache_dir: %s; no further block is stored", error.strerror or error)
            with self._lock:
                del self._queued[name]

    def _write(self, name: str, data: bytes) -> None:
        path = self._root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        try:
            with open(partial, "wb", opener=_private) as file:
                file.write(_checksum(name, data))
                file.write(data)
            os.replace(partial, path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
        with self._lock:
            self._files[name] = CHECKSUM + len(data)
            self._bytes += CHECKSUM + len(data)
            self.stored += 1
        self._evict()

    def _evict(self) -> None:
        """Delete the least recently used files beyond the limit."""
        victims = []
        with self._lock:
            while self._bytes > self._max_bytes and self._files:
                name, size = self._files.popitem(last=False)
                self._bytes -= size
                victims.append(name)
        for name in victims:
            with suppress(OSError):
                (self._root / name).unlink()

    def _forget(self, name: str, error: Exception) -> None:
        damaged = not isinstance(error, FileNotFoundError)
        with self._lock:
            self._bytes -= self._files.pop(name, 0)
            self.damaged += damaged
        if damaged:
            log.warning("cache_dir: a stored block is not used: %s", error)
            with suppress(OSError):
                (self._root / name).unlink()


def _scan(root: Path) -> list[tuple[str, int]]:
    """Stored blocks, least recently used first. Deletes what an interrupted write left behind.

    Only names that this cache gives are looked at: the user may name a directory with other
    files."""
    found: list[tuple[float, str, int]] = []
    for folder in root.glob("*/??"):
        for entry in os.scandir(folder) if folder.is_dir() else ():
            name = f"{folder.parent.name}/{folder.name}/{entry.name}"
            match = OWN_FILE.fullmatch(name)
            if match is None:
                continue
            with suppress(OSError):
                if match["partial"]:
                    os.unlink(entry.path)
                else:
                    stat = entry.stat()
                    found.append((stat.st_mtime, name, stat.st_size))
    return [(name, size) for _, name, size in sorted(found)]


def _checksum(name: str, data: bytes) -> bytes:
    state = blake2b(name.encode(), digest_size=CHECKSUM)
    state.update(data)
    return state.digest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read_or_make_key(path: Path) -> bytes:
    """The key of the block hashes. Without it, a client that can guess a prompt could name the file
    of its blocks."""
    with suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY:
            return key
        path.unlink(missing_ok=True)  # an interrupted copy: the blocks under it are unreachable
    partial = path.with_name(f"key.{secrets.token_hex(4)}")
    with open(partial, "wb", opener=_private) as file:
        file.write(secrets.token_bytes(KEY))
    with suppress(FileExistsError):  # another engine process created the key first
        os.link(partial, path)
    partial.unlink()
    return path.read_bytes()

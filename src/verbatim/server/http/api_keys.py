"""The API keys of a server, with the name and the limits of each.

In: lines `KEY [name=NAME] [LIMIT=N ...]` of --api-key-file, and the words of VERBATIM_API_KEY. Out:
the tenant of a key, and a tenant's limits. Only digests of keys are kept here.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from verbatim.base.errors import ParameterError

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII).fullmatch


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one tenant; 0: none."""

    max_open: int = 0  # open requests; in place of --max-per-key
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts and outputs


class ApiKeys:
    """The tenants by the digests of their keys. Several keys may have one name, so that a tenant
    can change its key while the old one still works."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.replace(lines)

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def replace(self, lines: Iterable[str]) -> None:
        tenants: list[tuple[bytes, str]] = []
        limits: dict[str, KeyLimits] = {}
        for line in lines:
            key, tenant, own = parse_key(line)
            if limits.setdefault(tenant, own) != own:
                why = f"the keys of the name {tenant} have different limits; give each the same"
                raise ParameterError("api_key_file", why)
            tenants.append((hashlib.sha256(key.encode()).digest(), tenant))
        self._tenants, self._limits = tenants, limits

    def tenant_of(self, candidate: bytes) -> str | None:
        """The tenant of a key. Compares with every key in constant time."""
        digest = hashlib.sha256(candidate).digest()
        found: str | None = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(digest, known):
                found = tenant
        return found

    def limits_of(self, tenant: str) -> KeyLimits:
        return self._limits.get(tenant, KeyLimits())


def parse_key(line: str) -> tuple[str, str, KeyLimits]:
    """(key, tenant, limits) of one line. Without a name, the tenant is a digest of the key. An
    error does not contain the key.

    >>> parse_key("sk-0123456789 name=alice max_open=4")
    ('sk-0123456789', 'alice', KeyLimits(max_open=4, requests_per_minute=0, tokens_per_minute=0))
    """
    key, *words = line.split() or [""]
    if len(key) < 8 or not key.isascii() or not key.isprintable():
        raise ParameterError("api_key_file", "a key needs at least 8 printable ASCII characters")
    tenant, limits = hashlib.sha256(key.encode()).hexdigest()[:16], {}
    known = [field.name for field in fields(KeyLimits)]
    for word in words:
        name, _, value = word.partition("=")
        if name == "name" and NAME(value):
            tenant = value
        elif name in known and value.isdecimal() and int(value) and name not in limits:
            limits[name] = int(value)
        else:
            why = "behind a key come name=NAME (letters, digits and . _ -) and limits above 0, each"
            why += f" once: {'=N, '.join(known)}=N; separated by spaces"
            raise ParameterError("api_key_file", why)
    return key, tenant, KeyLimits(**limits)


def read_keys(path: str | None) -> tuple[str, ...]:
    """The lines of the keys in the environment and the file. A file without keys is an error: the
    server would otherwise run without access control."""
    found = os.environ.get("VERBATIM_API_KEY", "").split()
    for key in found:
        _check_line(key, "VERBATIM_API_KEY")
    if path is None:
        return tuple(found)
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        why = f"{path} cannot be read as text; check its path and encoding"
        raise ParameterError("api_key_file", why) from None
    before = len(found)
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            _check_line(line, f"{path}, line {number}")
            found.append(line.strip())
    if len(found) == before:
        raise ParameterError("api_key_file", f"{path} contains no key; put one on a line")
    return tuple(dict.fromkeys(found))


def _check_line(line: str, where: str) -> None:
    try:
        parse_key(line)
    except ParameterError as error:
        why = error.message.partition(": ")[2]
        raise ParameterError("api_key_file", f"{where}: {why}") from None

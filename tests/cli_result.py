"""The result of one call of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class CliResult:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, "exactly one object, on one line"
        value: dict[str, Any] = json.loads(self.out)
        return value


Call = Callable[..., CliResult]

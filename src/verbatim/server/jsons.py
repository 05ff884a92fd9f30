"""JSON as it leaves: compact, UTF-8, never NaN. One encoder, made once."""

from __future__ import annotations

import json
from typing import Any

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def dumps(value: Any) -> bytes:
    return _encode(value).encode()

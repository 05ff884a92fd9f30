"""The server of the documentation's examples: the default model, started when first asked for."""

from __future__ import annotations

import tempfile
from pathlib import Path

from live_server import Live


class DocServer:
    def __init__(self) -> None:
        self._live: Live | None = None

    def port(self) -> int:
        if self._live is None:
            flags = ("--model", "smollm2", "--served-model-name", "smollm2", "--pooling", "mean")
            state = Path(tempfile.mkdtemp()) / "state"
            flags += ("--state-dir", str(state))
            self._live = Live(*flags, engine=None).wait_ready()
        return self._live.port

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()

"""The loop of a rival's worker process: JSON lines in, seconds out. It runs in the rival's own
interpreter and imports nothing from verbatim.

    {"op": "open", "model": PATH, "threads": 2, "context": 2304, "device": "cpu"}
                                                                  -> {"version": ..., "load": s}
    {"op": "prefill", "tokens": 512}                              -> {"seconds": s}
    {"op": "decode", "context": 512, "steps": 32}                 -> {"seconds": s}, without prefill
    {"op": "batch", "sequences": 16, "context": 32, "steps": 32}  -> {"seconds": s}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable


def serve(open_worker: Callable[..., object]) -> None:
    """Answer until the input ends. The worker has `version`, `load`, and a method per operation."""
    # Output of libraries, and of their own processes, must not break the protocol.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker: object = None
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        try:
            if op == "open":
                worker = open_worker(**request)
                answer = {name: getattr(worker, name) for name in ("version", "load")}
            else:
                answer = {"seconds": getattr(worker, op)(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)

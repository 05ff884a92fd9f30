"""The engine's own error when a replica or a batch actor cannot start.

Ray passes on a constructor's exception as the text of nested tracebacks. So the actor raises its
error as one JSON string behind a mark, and this process finds it in whatever Ray reports.
"""

from __future__ import annotations

import json
import re

MARK = "the engine did not start: "
_REASON = re.compile(re.escape(MARK) + r'("(?:[^"\\]|\\.)*")')


def did_not_start(reason: str) -> RuntimeError:
    return RuntimeError(MARK + json.dumps(reason, ensure_ascii=False))


def reason_in(report: str) -> str:
    """The engine's error in a report of Ray; empty: the report has none.

    >>> reason_in(f"Traceback ...\\\\nRuntimeError: {did_not_start('context: too long')}")
    'context: too long'
    """
    found = _REASON.search(report)
    return str(json.loads(found[1])) if found else ""


def last_line(report: str) -> str:
    """The line of a traceback that names the error."""
    return report.strip().rpartition("\n")[2].strip()

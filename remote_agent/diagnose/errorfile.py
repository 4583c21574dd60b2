"""torch's error file.

In: its bytes. Out: message, call stack and time, whatever form of torch's it has.
"""

from __future__ import annotations

import json
from typing import Any

# torch writes whole seconds; the file's own time is finer, and right unless the file was copied.
STAMP_SLACK_NS = 2_000_000_000
# The year 2255: what says more is no time.
STAMP_MAX_S = 9_000_000_000


def read_error_document(text: bytes, modified_ns: int = 0) -> dict[str, Any] | None:
    """Return {message, callstack, timestamp_ns}, None where it cannot be read; `modified_ns`: the file's own time."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or "message" not in document:
        return None
    inner = document["message"]
    if not isinstance(inner, dict):
        return _error(inner, None, document.get("timestamp"), modified_ns)
    extra = inner.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    return _error(inner.get("message"), extra.get("py_callstack"), extra.get("timestamp"), modified_ns)


def _error(message: Any, callstack: Any, timestamp: Any, modified_ns: int) -> dict[str, Any]:
    try:
        said_s = int(timestamp)
    except (TypeError, ValueError, OverflowError):
        said_s = -1
    said_ns = said_s * 1_000_000_000 if 0 <= said_s <= STAMP_MAX_S else modified_ns
    near = abs(modified_ns - said_ns) <= STAMP_SLACK_NS
    return {
        "message": str(message),
        "callstack": None if callstack is None else str(callstack),
        "timestamp_ns": modified_ns if near else said_ns,
    }

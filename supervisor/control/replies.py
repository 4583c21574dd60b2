"""The reply to a request that names several nodes or ranks.

In: what happened on one node, or to one rank. Out: its entry in the reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from remote_agent.wire import CallFailed
from supervisor.errors import SupervisorError, why


class Entry(TypedDict):
    """The outcome for one node or rank."""

    accepted: bool
    message: str
    hint: str


def entry(accepted: bool, message: str, hint: str = "") -> Entry:
    """Return one outcome."""
    return {"accepted": accepted, "message": message, "hint": hint}


def failed_entry(node: str, error: BaseException) -> Entry:
    """Return the outcome for a node where a request failed; the message names the node."""
    if isinstance(error, SupervisorError):
        return entry(False, error.message, error.hint)
    if isinstance(error, CallFailed):
        return entry(False, f"{node}: {error.message}", error.hint)
    return entry(False, f"{node}: {why(error)}")


def all_messages(entries: Iterable[Entry]) -> str:
    """Return the messages of several outcomes as one text."""
    return "; ".join(one["message"] for one in entries)

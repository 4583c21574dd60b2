"""The reply to a request that names several nodes or ranks.

In: what happened on one node, or to one rank. Out: its entry in the reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from remote_agent.wire import CallFailed
from supervisor.errors import SupervisorError, why

if TYPE_CHECKING:
    from remote_agent.wire.documents import ReplyEntry


def entry(accepted: bool, message: str, hint: str = "") -> ReplyEntry:
    """Return one outcome."""
    return {"accepted": accepted, "message": message, "hint": hint}


def failed_entry(node: str, error: BaseException) -> ReplyEntry:
    """Return the outcome for a node where a request failed; the message names the node."""
    if isinstance(error, SupervisorError):
        return entry(False, error.message, error.hint)
    if isinstance(error, CallFailed):
        return entry(False, f"{node}: {error.message}", error.hint)
    return entry(False, f"{node}: {why(error)}")


def all_messages(entries: Iterable[ReplyEntry]) -> str:
    """Return the messages of several outcomes as one text."""
    return "; ".join(one["message"] for one in entries)

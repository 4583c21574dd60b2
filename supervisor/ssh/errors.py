"""Why a host could not be brought up.

In: host, step, reason. Out: HostError, which the operator sees as one line.

    SupervisorError
     ├ HostError      one host, one step (resolve connect auth prelude python push sync start engine), what to do next
     └ SyncError      the work tree here cannot be sent anywhere
"""

from __future__ import annotations

from supervisor.errors import SupervisorError


class HostError(SupervisorError):
    """One host failed at one step."""

    exit_status = 3

    def __init__(self, host: str, step: str, reason: str, hint: str = "") -> None:
        super().__init__(f"{host}: {step}: {reason}", hint)
        self.host = host
        self.step = step
        self.reason = reason


class SyncError(SupervisorError):
    """The work tree on this machine cannot be sent."""

    exit_status = 2

"""What the supervisor tells the operator when something cannot be done.

In: a reason and what to do next. Out: exceptions that carry both, and the exit status of the contract.

    SupervisorError          1  a request failed
     ├ UsageError            2  the command line or the inventory is wrong; nothing was started
     ├ Unreachable           3  the job, or every host that could know it, cannot be reached
     ├ LaunchFailed          3  too few nodes came up; what had been started is stopped again
     └ RequestFailed         1  the cluster refused a request
"""

from __future__ import annotations

from dataclasses import dataclass

# Of `up`, and of a screen that is left, by the state in which the job ended.
EXIT_STATUS = {"succeeded": 0, "failed": 1, "stopped": 4}


class SupervisorError(Exception):
    """Base: one clear message, a hint with the next step, and the exit status."""

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(SupervisorError):
    """The command line or the inventory is wrong; nothing was started."""

    exit_status = 2


class Unreachable(SupervisorError):
    """The job, or every host that could know it, cannot be reached."""

    exit_status = 3


def why(error: BaseException) -> str:
    """Return what went wrong on a wire; a deadline has no text of its own."""
    return str(error) or "no answer in time"


@dataclass(frozen=True)
class HostFailure:
    """Why one host could not be brought up."""

    host: str
    step: str
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{self.host}: {self.step}: {self.reason}"
        return f"{line} ({self.hint})" if self.hint else line


class LaunchFailed(SupervisorError):
    """Too few nodes came up; what had been started is stopped again."""

    exit_status = 3

    def __init__(self, message: str, failures: tuple[HostFailure, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint)
        self.failures = failures

    def __str__(self) -> str:
        return "\n".join([*(str(failure) for failure in self.failures), super().__str__()])


class RequestFailed(SupervisorError):
    """The cluster refused a request, or did not carry it out in time; `kind` is for programs."""

    def __init__(self, message: str, hint: str = "", kind: str = "") -> None:
        super().__init__(message, hint)
        self.kind = kind

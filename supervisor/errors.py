"""The errors that an operator sees.

In: a message and a hint. Out: exceptions with both and an exit code.

    SupervisorError          1  a request failed
     ├ UsageError            2  the command line or the inventory is wrong; nothing was started
     ├ Unreachable           3  the job, or every host that could know it, cannot be reached
     ├ LaunchFailed          3  too few nodes came up; what had been started was stopped again
     ├ RequestFailed         1  the cluster refused a request
     ├ HostError             3  one host, one step: connect, auth, push, sync, start, build, engine …
     └ SyncError             2  the work tree on this machine cannot be sent
"""

from __future__ import annotations

from dataclasses import dataclass

# The exit code of `up`, and of the screen, by the state in which the job ended.
EXIT_STATUS = {"succeeded": 0, "failed": 1, "stopped": 4}


class SupervisorError(Exception):
    """Base class: a message, a hint on what to do next, and the exit code."""

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
    """Return the text of an error on a connection, without the host's name; a timeout has none of its own."""
    return error.reason if isinstance(error, HostError) else str(error) or "no answer in time"


def one_line(text: str) -> str:
    """Return a text that a node or a server may have written as one line: no line of it must look like one of ours."""
    return " / ".join([part for line in text.splitlines() if (part := line.strip())])


@dataclass(frozen=True)
class HostFailure:
    """Why one host could not be brought up."""

    host: str
    step: str
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{self.host}: {self.step}: {self.reason}"
        return one_line(f"{line} ({self.hint})" if self.hint else line)


class LaunchFailed(SupervisorError):
    """Too few nodes came up; what had been started was stopped again."""

    exit_status = 3

    def __init__(self, message: str, failures: tuple[HostFailure, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint)
        self.failures = failures

    def __str__(self) -> str:
        return "\n".join([*(str(failure) for failure in self.failures), super().__str__()])


class RequestFailed(SupervisorError):
    """The job refused a request, or did not carry it out in time; `kind` is for programs."""

    def __init__(self, message: str, hint: str = "", kind: str = "") -> None:
        super().__init__(one_line(message), one_line(hint))
        self.kind = kind


class HostError(SupervisorError):
    """One host failed at one step."""

    exit_status = 3

    def __init__(self, host: str, step: str, reason: str, hint: str = "") -> None:
        self.host = host
        self.step, self.reason = one_line(step), one_line(reason)
        super().__init__(f"{host}: {self.step}: {self.reason}", one_line(hint))


class JobInTheWay(HostError):
    """A job on the host forbids this launch, which has changed nothing there; `reason` says so without the host."""


class SyncError(SupervisorError):
    """The work tree on this machine cannot be sent."""

    exit_status = 2

"""How a process ended, in words.

In: exit code and signal as the engine reports them. Out: one phrase, the signal's category.
"""

from __future__ import annotations

import signal as signals

_MEANINGS = {
    "SIGKILL": "forced",
    "SIGTERM": "termination request",
    "SIGINT": "interrupted",
    "SIGHUP": "terminal closed",
    "SIGSEGV": "invalid memory access",
    "SIGABRT": "abort() was called",
    "SIGBUS": "memory without backing storage, for example because /dev/shm is full",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "invalid machine instruction: built for another CPU",
    "SIGPIPE": "wrote to a closed pipe",
    "SIGXCPU": "CPU time limit exceeded",
    "SIGXFSZ": "file size limit exceeded",
    "SIGQUIT": "quit with a core dump",
    "SIGUSR1": "unhandled warning of a scheduler",
    "SIGUSR2": "unhandled warning of a scheduler",
}
SIGNAL_CATEGORIES = {
    "SIGSEGV": "segfault",
    "SIGABRT": "sigabrt",
    "SIGBUS": "bus_error_shm",
    "SIGTERM": "signal_preempted",
    "SIGINT": "signal_preempted",
    "SIGHUP": "signal_preempted",
    "SIGXCPU": "signal_preempted",
    "SIGUSR1": "signal_preempted",
    "SIGUSR2": "signal_preempted",
}

# These signals need more specific advice than their category gives.
SIGNAL_HINTS = {
    "SIGABRT": "stderr has no reason: set PYTHONFAULTHANDLER=1 to see the line, or open the core file in gdb",
    "SIGFPE": "an integer was divided by zero in native code: check sizes that may be 0, and run with "
    "PYTHONFAULTHANDLER=1 to see the line",
    "SIGILL": "compare the node's CPU (lscpu) with the one that torch and its extensions were built for",
    "SIGTRAP": "native code ended the process by an assertion: check the last lines of its output",
    "SIGXFSZ": "raise the limit on file sizes (ulimit -f) on the node",
    "SIGPIPE": "the process that read its output has ended: check the pipe that the script writes to",
    "SIGSYS": "a seccomp filter forbids the system call: check the container's security profile",
}


def signal_name(code: int | None, signal: str | None) -> str | None:
    """Return the signal that ended a process, also for the codes -9 and 137; None: it exited by itself."""
    if signal:
        return signal
    if code is None or 0 <= code <= 128:
        return None
    number = -code if code < 0 else code - 128 if code <= 128 + 31 else 0
    try:
        return signals.Signals(number).name
    except ValueError:
        return None


def decode_exit(code: int | None, signal: str | None) -> str:
    """Return the end of a process in words, such as `killed by SIGSEGV (invalid memory access)`."""
    name = signal_name(code, signal)
    meaning = f" ({_MEANINGS[name]})" if name in _MEANINGS else ""
    if name is not None and not signal and code is not None and code > 0:
        return f"exited with code {code}, which is how a shell reports {name}{meaning}"
    if name is not None:
        return f"killed by {name}{meaning}"
    if code is None:
        return "ended in an unknown way"
    return f"exited with code {code}"

"""How a process ended, in words.

In: exit code and signal as the engine reports them. Out: one phrase, the signal's category, what others write of it.
"""

from __future__ import annotations

import signal as signals

_WORDS = {
    "SIGKILL": "ended by force",
    "SIGTERM": "asked to end",
    "SIGINT": "interrupted",
    "SIGHUP": "its terminal was closed",
    "SIGSEGV": "invalid memory access",
    "SIGABRT": "abort() was called",
    "SIGBUS": "memory that could not be backed, as when /dev/shm is full",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "invalid machine instruction: built for another CPU",
    "SIGPIPE": "wrote to a pipe that nobody reads",
    "SIGXCPU": "over its CPU time limit",
    "SIGXFSZ": "over its file size limit",
    "SIGQUIT": "asked to dump core",
    "SIGUSR1": "a scheduler's warning that was not handled",
    "SIGUSR2": "a scheduler's warning that was not handled",
}
CATEGORIES = {
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


def signal_name(code: int | None, signal: str | None) -> str | None:
    """Return the signal that ended a process, also from -9 or a shell's 137; None: it exited by itself."""
    if signal:
        return signal
    if code is None:
        return None
    number = -code if code < 0 else code - 128 if 128 < code <= 128 + 31 else 0
    try:
        return signals.Signals(number).name
    except ValueError:
        return None


def decode_exit(code: int | None, signal: str | None) -> str:
    """Return the end of a process in words, such as `killed by SIGSEGV (invalid memory access)`."""
    name = signal_name(code, signal)
    words = f" ({_WORDS[name]})" if name in _WORDS else ""
    if name is not None and not signal and code is not None and code > 0:
        return f"exited with code {code}, which is how a shell reports {name}{words}"
    if name is not None:
        return f"killed by {name}{words}"
    if code is None:
        return "ended, nobody knows how"
    return f"exited with code {code}"


def told_of(name: str, word: str) -> tuple[str, ...]:
    """Return expressions for what launchers, shells and Python write of a process that this signal ended."""
    number = signals.Signals[name].value
    return (
        rf"[Ee]xit ?code\s*:? -{number}\b",
        rf"exits with return code = -{number}\b",
        rf"Signal {number} \({name}\)",
        rf"terminated with signal {name}\b",
        rf"died with <Signals\.{name}\b",
        rf"exited on signal {number} ",
        rf"Caught signal {number} \(",
        rf"{name} received at ",
        rf"Signal: {word} \({number}\)",
        rf"KILLED BY SIGNAL: {number} ",
        rf"EXIT STRING: {word} \(signal {number}\)",
        rf"[Ee]xit(?:ed)?(?: with)?(?: exit)?(?: status)?(?: code)?[ :=]+{128 + number}\b",
        rf"line \d+: +\d+ {word}\b",
        rf"Fatal Python error: {word}",
        rf"\b{word} \(core dumped\)",
    )

"""Which stream a line belongs to: a line of NCCL is of its own one, whichever file it stands in.

In: lines of files. Out: those of the streams asked for; word, once, that lines of NCCL are left out.
"""

from __future__ import annotations

from collections.abc import Callable

from remote_agent.logs.rows import NCCL_MARK, stream_of

STREAMS = ("stdout", "stderr", "nccl")


def files_of(streams: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files that may hold these streams: NCCL writes into the script's where it was told no other."""
    return STREAMS if "nccl" in streams else streams


class Sieve:
    """Lets the lines of some streams through."""

    def __init__(self, streams: tuple[str, ...], say: Callable[[], None]) -> None:
        self._streams = streams
        self._say: Callable[[], None] | None = say if "nccl" not in streams else None

    def holds(self, stream: str, text: bytes) -> bool:
        """True for a line that is let through."""
        return stream_of(stream, text) in self._streams or self.note(1)

    def lines(self, stream: str, lines: bytes) -> bytes:
        """Return those of some whole lines that are let through."""
        if stream in self._streams and ("nccl" in self._streams or NCCL_MARK not in lines):
            return lines
        return b"".join(b"%s\n" % line for line in lines[:-1].split(b"\n") if self.holds(stream, line))

    def note(self, apart: int) -> bool:
        """Take word that so many lines were left out; returns False."""
        if apart and self._say is not None:
            self._say()
            self._say = None
        return False

"""What a node, a file or a server may put into any text, and what of it may reach a terminal: nothing.

In: a document. Out: the same with HOSTILE in each of its texts, a job of such documents; whether an output is harmless.
"""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

from supervisor.link.view import HostView
from tests.screens import recorded
from tests.screens.recorded import RecordedSession

# The title, the clipboard, a clear screen, the alternate screen, a device control string, the same in C1, a line that
# is overwritten, marks of direction, a byte that is no text.
HOSTILE = (
    "\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x1b[2J\x1b[H\x1b[?1049h\x1bP+q544e\x1b\\\x9b2J\x9d0;owned\x9c\rn9:9| all is"
    " well\x08\x7f\u202egnp\u2066x\u2069\u200f\u061c\udc9b"
)
ACTED_ON = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def with_hostile_texts(document: Any, keep: tuple[str, ...] = ()) -> Any:
    """The document with HOSTILE at the end of each text, but not of times, and not under the keys to keep."""
    if isinstance(document, str):
        return document + HOSTILE
    if isinstance(document, list):
        return [with_hostile_texts(one, keep) for one in document]
    if isinstance(document, dict):
        kept = {key for key in document if key in keep or key == "time" or key.endswith("_at")}
        return {key: value if key in kept else with_hostile_texts(value, keep) for key, value in document.items()}
    return document


def hostile_session(name: str = "failed_4x2") -> RecordedSession:
    """A job with HOSTILE in every name and text but the types of its events, and in the lines of its ranks."""
    session = recorded.load(name)
    session.job += HOSTILE
    keep = ("type",)
    session.status = with_hostile_texts(session.status, keep)
    session.events = with_hostile_texts(session.events, keep)
    session.incidents = with_hostile_texts(session.incidents, keep)
    views = [with_hostile_texts(dataclasses.asdict(view), ("state",)) for view in session.hosts.values()]
    session.hosts = {view["name"]: HostView(**view) for view in views}
    printed = f" owned{HOSTILE}\nn9:9| forged".encode(errors="surrogateescape")
    session.files = {
        (f"{node}{HOSTILE}", generation, rank, stream): [
            dataclasses.replace(line, text=line.text + printed) for line in lines
        ]
        for (node, generation, rank, stream), lines in session.files.items()
    }
    return session


def check_harmless(shown: str, *, colours: bool = False) -> None:
    """A terminal acts on nothing in this text but newlines, tabs and, if they are expected, colours."""
    assert "owned" in shown, "the hostile text is not there, so this shows nothing"
    left = _COLOUR.sub("", shown) if colours else shown
    acted_on = ACTED_ON.search(left)
    assert acted_on is None, (acted_on, left[max(0, acted_on.start() - 40) : acted_on.end() + 40])


class Screen(io.TextIOWrapper):
    """A file that says it is a terminal."""

    def __init__(self) -> None:
        super().__init__(_TerminalBytes(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        """It is one."""
        return True

    @property
    def text(self) -> str:
        """What was written to it."""
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode("utf-8", "surrogateescape")


class _TerminalBytes(io.BytesIO):
    def isatty(self) -> bool:
        return True

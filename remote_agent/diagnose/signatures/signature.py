"""The type of a signature, and how one is written.

In: regular expressions. Out: Signature.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import signal as signals
from collections.abc import Iterable
from typing import TypedDict

from remote_agent.text.names import read_number

# A role says what a match means for the rank: PRIMARY may be the cause; GENERIC may be the cause where nothing is
# more specific; SECONDARY usually marks a rank that failed as a consequence; NEUTRAL wraps a reason printed elsewhere.
PRIMARY, GENERIC, SECONDARY, NEUTRAL = "primary", "generic", "secondary", "neutral"

# Titles on which the attribution depends.
WRONG_SIZE = "received a tensor of another size than expected"
DIED = "died according to its parent process; its own output does not say why"
CHILD_FAILED = "a child process failed; see that process's own output"


class NamedRanks(TypedDict, total=False):
    """The ranks that a text names, as fields of its finding."""

    named: tuple[int, ...]
    peer: int | None
    awaited: int | None


@dataclasses.dataclass(frozen=True)
class Signature:
    """Texts that mean the same failure; `title` replaces the matched text in the summary.

    The group `rank` names the culprits. The group `peer` names a rank that others differ from: it is the culprit if
    several ranks name it.
    """

    category: str
    role: str
    texts: tuple[str, ...]
    title: str = ""
    hint: str = ""
    signal: str = ""
    """The signal that ended the process, according to the text."""

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        """One expression for all texts, compiled when it is first searched: most agents never judge a failure."""
        return _compile(self.texts)

    def ranks_in(self, text: str) -> NamedRanks:
        """Return the ranks that a text names."""
        match = self.regex.search(text)
        groups = {} if match is None else match.groupdict()
        ranks, peer = groups.get("rank"), groups.get("peer")
        return {
            "named": tuple(map(read_number, ranks.split(", "))) if ranks else (),
            "peer": read_number(peer) if peer else None,
        }


def _signature(role: str, category: str, *texts: str, title: str = "", hint: str = "") -> Signature:
    """Return the signature of expressions that all mean the same."""
    return Signature(category, role, texts, title, hint)


primary = functools.partial(_signature, PRIMARY)
generic = functools.partial(_signature, GENERIC)
secondary = functools.partial(_signature, SECONDARY)
neutral = functools.partial(_signature, NEUTRAL)


def killed_by(signal: str, word: str, category: str, *also: str, role: str = PRIMARY, title: str = "") -> Signature:
    """Return the signature of a process that a signal ended, as launchers, shells and Python print it, or `also`."""
    return Signature(category, role, (*_printed_for(signal, word), *also), title, signal=signal)


def _printed_for(name: str, word: str) -> tuple[str, ...]:
    number = signals.Signals[name].value
    # The last code is the lowest byte of a negative one. Programs exit with 255 and 254 for other failures.
    codes = "|".join([f"-{number}", str(128 + number), *([str(256 - number)] if number > 2 else [])])
    return (
        rf"Signal {number} \({name}\)",
        rf"terminated with signal {name}\b",
        rf"died with <Signals\.{name}\b",
        rf"exited on signal {number} ",
        rf"Caught signal {number} \(",
        rf"{name} received at ",
        rf"Signal: {word} \({number}\)",
        rf"KILLED BY SIGNAL: {number} ",
        rf"EXIT STRING: {word} \(signal {number}\)",
        rf"[Ee]xit(?:ed|s)?(?: with)?(?: exit| return)?(?: status)?(?: ?code)?\s*[ :=]+(?:{codes})\b",
        rf"line \d+: +\d+ {word}\b",
        rf"Fatal Python error: {word}",
        rf"\b{word} \(core dumped\)",
    )


def _compile(texts: Iterable[str]) -> re.Pattern[str]:
    r"""Return one expression for all texts, in which every alternative begins with a literal letter if possible.

    If all do, `re` skips to these letters instead of trying every position of a long log. So a `\b` before a word is
    checked behind the word's first letter, and `[Ll]oss` becomes two alternatives.
    """
    split = (re.sub(r"^\[(\w)(\w)\](.*)", r"\1\3|\2\3", text) for text in texts)
    return re.compile("|".join(re.sub(r"^\\b(\w)", r"\1(?<!\\w\1)", text) for text in split))

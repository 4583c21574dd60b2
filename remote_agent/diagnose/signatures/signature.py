"""The type of a signature, and how one is written.

In: regular expressions. Out: Signature.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import signal as signals
from collections.abc import Iterable
from typing import Any

from remote_agent.diagnose.claims import AWAITED, BASE, DIFFER, ENDED, FAILED, LOST, TOLD, WAITED
from remote_agent.text.names import read_number

# Titles on which the attribution depends.
WRONG_SIZE = "received a tensor of another size than expected"
DIED = "died according to its parent process; its own output does not say why"
CHILD_FAILED = "a child process failed; see that process's own output"


@dataclasses.dataclass(frozen=True)
class Signature:
    """Texts that make the same claim; `title` replaces the matched text in the summary.

    The group `rank` names ranks that failed, `peer` one that differs from the author, or for which it waited;
    `base` the one that all others are compared with.
    """

    category: str
    kind: str
    texts: tuple[str, ...]
    title: str = ""
    hint: str = ""
    weak: bool = False
    """True where it counts only if nothing is more specific."""
    vague: bool = False
    """True where any other cause says more: a way between two hosts, of which either may be broken, or a mere kill."""
    signal: str = ""
    """The signal that ended the process, according to the text."""

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        """One expression for all texts, compiled when it is first searched: most agents never judge a failure."""
        return _compile(self.texts)

    @property
    def is_strong(self) -> bool:
        """Whether it may be the cause, and says which."""
        return self.kind == FAILED and not self.weak

    @property
    def order(self) -> int:
        """The place among signatures that match one text: causes come first, the mere end of a process last."""
        return 3 if self.kind == ENDED else 2 if self.kind != FAILED else int(self.weak or self.vague)

    def others_in(self, text: str) -> tuple[str, tuple[int, ...]]:
        """Return what a text says of other ranks, and of which."""
        match = self.regex.search(text)
        groups = {} if match is None else match.groupdict()
        if ranks := groups.get("rank"):
            return FAILED, tuple(map(read_number, ranks.split(", ")))
        if base := groups.get("base"):
            return BASE, (read_number(base),)
        peer = groups.get("peer")
        return (DIFFER if self.kind == FAILED else AWAITED, (read_number(peer),)) if peer else ("", ())


def _signature(kind: str, category: str, *texts: str, **more: Any) -> Signature:
    """Return the signature of expressions that all mean the same."""
    return Signature(category, kind, texts, **more)


failed = functools.partial(_signature, FAILED)
weakly = functools.partial(_signature, FAILED, weak=True)
lost = functools.partial(_signature, LOST)
waited = functools.partial(_signature, WAITED)
told = functools.partial(_signature, TOLD)
ended = functools.partial(_signature, ENDED)


def killed_by(signal: str, word: str, category: str, *also: str, kind: str = FAILED, **more: Any) -> Signature:
    """Return the signature of a process that a signal ended, as launchers, shells and Python print it, or `also`."""
    return Signature(category, kind, (*_printed_for(signal, word), *also), signal=signal, **more)


def _printed_for(name: str, word: str) -> tuple[str, ...]:
    number = signals.Signals[name].value
    # The last code is the lowest byte of a negative one. Programs exit with 255 and 254 for other failures.
    codes = "|".join([f"-{number}", str(128 + number), *([str(256 - number)] if number > 2 else [])])
    return (
        rf"[Ss](?:ignal|IGNAL)s?:? ?\.?(?:{number}\b|{name}\b|{word} \()",
        rf"{name} received (?:at|by) ",
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

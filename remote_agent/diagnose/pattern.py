"""One signature of the table in patterns.py.

In: regular expressions. Out: Pattern.

Order in time and across ranks decides, not the loudest line: `primary` is a candidate for the cause, `generic` too
where nothing says more, `secondary` marks a rank that is usually a victim, `neutral` is a wrapper whose reason stands
elsewhere.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from remote_agent.diagnose.exits import told_of

PRIMARY, GENERIC, SECONDARY, NEUTRAL = "primary", "generic", "secondary", "neutral"


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One signature; `title` replaces the text in the summary.

    A group `rank` names the culprits; a group `peer` one that others differ from: the culprit where several say so.
    """

    category: str
    role: str
    regex: re.Pattern[str]
    title: str = ""
    hint: str = ""
    signal: str = ""
    """The signal that the text says ended the process."""


def death(signal: str, word: str, category: str, *also: str, role: str = PRIMARY, title: str = "") -> Pattern:
    """Return the signature of a process that a signal ended, as others tell it or `also` says."""
    return Pattern(category, role, _compile((*told_of(signal, word), *also)), title, signal=signal)


def pattern(category: str, role: str, *texts: str, title: str = "", hint: str = "") -> Pattern:
    """Return the signature of texts that all mean the same."""
    return Pattern(category, role, _compile(texts), title, hint)


def ranks_in(pattern: Pattern | None, text: str) -> dict[str, Any]:
    """Return the ranks that a text names, as `named` and `peer` of its finding."""
    match = None if pattern is None else pattern.regex.search(text)
    told = {} if match is None else match.groupdict()
    ranks, peer = told.get("rank"), told.get("peer")
    return {
        "named": tuple(int(rank) for rank in ranks.split(", ")) if ranks else (),
        "peer": int(peer) if peer else None,
    }


def _compile(texts: Iterable[str]) -> re.Pattern[str]:
    r"""Return the expression of texts that all mean the same, each of which begins with a letter if it can.

    Where all do, a search stops at these letters alone, else at each place of a long log. So the `\b` before a word is
    looked for behind its first letter, and `[Ll]oss` is two texts.
    """
    split = (re.sub(r"^\[(\w)(\w)\](.*)", r"\1\3|\2\3", text) for text in texts)
    return re.compile("|".join(re.sub(r"^\\b(\w)", r"\1(?<!\\w\1)", text) for text in split))

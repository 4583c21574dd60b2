"""Which other rank the text of an exception calls the one at fault.

In: the text, the rank that raised it. Out: `says` and `others` of its claim.
"""

from __future__ import annotations

import re

from remote_agent.diagnose.claims import DIFFER, FAILED
from remote_agent.text.names import read_number

_RANK = re.compile(r"\b[Rr]ank(?:[ :=#]{0,2}|\()(\d{1,6})\b(?!\s*(?:[-/.]\s*)?\d)")
# This matches a list of ranks: "missing ranks: [2, 3]".
_LIST = re.compile(r"\b[Rr]anks?(?: (?:are|is))?[ :=]{0,3}[\[{(](?P<ranks>\d{1,6}(?:, ?\d{1,6})*)[\]})]")
# These are states of a rank in such a list, so of a process and not of an argument.
_STATES = r"missing|failed|dead|lost|crashed|stuck|hung|unresponsive|killed|aborted|absent|lagging|unreachable"
# These words say that a rank, or a part of it, is at fault alone.
_FAILS = (
    r"fails?|failed|failure|die[sd]|dead|crash(?:ed)?|raised?|exited|left|gone|missing|lost|killed|aborted|stuck|hangs?|hung"
    r"|did not|didn't|does not|never|not respond\w*|unresponsive|timed out|lags?|behind|corrupt\w*|nan|NaN|no \w+"
    r"|[Dd]ead ?[Ll]ock(?:ed)?|error|exception|invalid|bad|empty|wrong|unexpected"
)
# If two ranks differ in something, either of them may be at fault.
_DIFFERS = r"differs?|different|inconsistent|mismatch\w*|diverge[sd]|disagree[sd]?|unequal|not (?:equal|match|the same)"
# What follows a rank that all others differ from.
_UNLIKE_ALL = re.compile(r"\b(?:while|but|whereas) (?:all )?(?:the )?others?\b")
# What a library says of a rank for which it waited, or which it lost.
_NOT_HEARD = re.compile(
    r"\b(?:not received|did not receive|no response|waiting for|waited for|closed by|lost)\b[^.;:\n]{0,60}"
    r"\brank[ :]{0,2}[\[(]?(\d{1,6})\b(?![^\n]*group_name_)"
)
_NEAR = 48


def unheard(text: str) -> tuple[int, ...]:
    """Return the rank from which nothing came, as the text of one that waited for it says."""
    return tuple(map(read_number, _NOT_HEARD.findall(text)))[:1]


def accused(text: str, rank: int | None) -> tuple[str, tuple[int, ...]]:
    """Return what a text says of the only other rank that it names: FAILED or DIFFER, and the rank.

    Several are accused only in a list; one that is only mentioned is not accused.
    """
    listed = _LIST.search(text)
    if listed is not None:
        near = f"{text[: listed.start()][-_NEAR:]} {text[listed.end() :][:_NEAR]}"
        ranks = tuple(map(read_number, listed["ranks"].split(",")))
        if re.search(rf"\b(?:{_STATES}|did not|didn't|never)\b", near) and rank not in ranks:
            return FAILED, ranks
    others = {read_number(match[1]): match for match in _RANK.finditer(text) if read_number(match[1]) != rank}
    if len(others) != 1:
        return "", ()
    ((other, match),) = others.items()
    before = re.split(r"[.;\n,](?:\s|$)", text[: match.start()])[-1]
    after = re.split(r"[.;\n,](?:\s|$)", text[match.end() :])[0][:_NEAR]
    around = f"{before[-_NEAR:]} {after}"
    if re.search(rf"\b(?:{_DIFFERS})\b", around):
        return DIFFER, (other,)
    of_it = re.search(rf"\b(?:{_FAILS})\b.{{0,24}}\b(?:from|of|on|in|by)(?: \w+)? $", before)
    it_failed = re.match(rf"['\")\]]?(?:'s [\w ]{{1,30}})? ?(?:\([^)]*\) )?(?:\w+ ){{0,2}}(?:{_FAILS})\b", after)
    if not (of_it or it_failed or _UNLIKE_ALL.search(after)):
        return "", ()
    return FAILED, (other,)

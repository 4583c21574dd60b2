"""What texts without a failure show: a run that gets on or is done, or one that stands where its ranks should meet.

In: lines. Out: whether the run gets on, whether it stands, whether a complaint was overcome.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_agent.diagnose import Incident
    from supervisor.postmortem.ranks import Line

# As training prints at each step or epoch, and at its end.
_STEPS = re.compile(
    r"\b(?:step|iter|iteration|epoch)\b\W{0,3}\d|loss\b['\"]?\s*[:=]\s*-?\d|^\s*\d+%\||\b(?:tokens|samples|images)/s"
    r"|train_runtime|\b(?:training|job|run)\b.{0,20}\b(?:complete|completed|finished|done|succeeded)\b"
    r"|\b(?:finished|completed) training\b",
    re.IGNORECASE,
)
_MEETINGS = re.compile(
    r"\bCCL\b|\b[NR]CCL\b|nccl==|process[ _]group|distributed|rendezvous|c10d|world[ _]size|\bbarrier\b|waiting for",
    re.IGNORECASE,
)
# Whatever they match holds one of these: to look for words costs far less.
_OF_STEPS = ("step", "iter", "epoch", "loss", "%|", "s/s", "training", "job", "run")
_OF_MEETINGS = ("ccl", "process", "distributed", "rendezvous", "c10d", "world", "barrier", "waiting for")
_UNCAUGHT = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|terminate called")
# Half-precision training tries smaller scales of the loss now and then: after so many good steps it was no more.
_SKIPPED = re.compile(r"OVERFLOW! Rank \d+ Skipping step|\b(?:[Ll]oss|grad[_ ]norm)['\"]?[:=]? ?(?:nan|NaN)\b")
_OF_SKIPPED = ("OVERFLOW", "nan", "NaN")
_GOOD_STEPS = 10
# These are tried again, mostly with success.
_TRIED_AGAIN = ("rendezvous_timeout", "gloo_connection_reset")


def stands(lines: Iterable[str]) -> bool:
    """Whether the text ends where ranks meet each other, before any step is done."""
    meets = False
    for text in lines:
        if _gets_on(text):
            return False
        meets = meets or _says(text, _OF_MEETINGS, _MEETINGS)
    return meets


def _gets_on(text: str) -> bool:
    return _says(text, _OF_STEPS, _STEPS)


def _says(text: str, words: Iterable[str], expression: re.Pattern[str]) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in words) and expression.search(text) is not None


def overcome(incident: Incident, files: Iterable[tuple[str, Line]]) -> bool:
    """Whether all that was found are lost connections or skipped steps, and the run got on behind them."""
    if incident.evidence and all(_SKIPPED.search(each.text) for each in incident.evidence):
        return _settled(line for _, line in files)
    if incident.category not in _TRIED_AGAIN or any(each.category not in _TRIED_AGAIN for each in incident.victims):
        return False
    went_on: dict[str, int] = {}
    for name, line in files:
        if _UNCAUGHT.search(line.text):
            return False
        if _gets_on(line.text):
            went_on[name] = line.number
    return all((each.line or 0) < went_on.get(each.file or "", 0) for each in incident.evidence)


def without_settled(lines: list[Line]) -> list[Line]:
    """Leave out steps that were skipped where training settled behind them: a later failure has another cause."""
    if not any(_skipped(line.text) for line in lines) or not _settled(lines):
        return lines
    return [line for line in lines if not _skipped(line.text)]


def _skipped(text: str) -> bool:
    return any(word in text for word in _OF_SKIPPED) and _SKIPPED.search(text) is not None


def _settled(lines: Iterable[Line]) -> bool:
    """Whether good steps stand behind the last that was skipped."""
    good = 0
    for line in lines:
        if _skipped(line.text):
            good = 0
        elif _gets_on(line.text):
            good += 1
    return good >= _GOOD_STEPS

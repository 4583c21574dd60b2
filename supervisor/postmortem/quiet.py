"""What texts without a failure show: a run that gets on or is done, or one that stands where its ranks should meet.

In: lines. Out: whether the run gets on, whether it stands, whether a complaint was overcome.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_agent.diagnose import Incident
    from remote_agent.diagnose.model import Evidence
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
# Who has ended is no more than quoted by what comes behind.
_ENDS = re.compile(
    r"exit ?code|[Ee]xited with|return code|terminated with|[Kk]illed|CANCELLED|[Rr]estart|[Ss]ignal \d|core dumped"
    r"|Connection (?:reset|closed)|^srun: |^slurmstepd: "
)
_END_LINES = 10
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


def got_past(incident: Incident, ranks: Mapping[int | None, Sequence[tuple[str, Line]]]) -> bool:
    """Whether whoever complained trained on until the end of the text, in which nothing says that a process ended."""
    if incident.exit_code is not None or incident.exit_signal is not None or not incident.evidence:
        return False
    fatal = _SKIPPED if incident.category == "nan_loss" else _ENDS
    return all(_went_on(ranks.get(each.rank, ()), each, fatal) for each in incident.evidence)


def _went_on(lines: Sequence[tuple[str, Line]], proof: Evidence, fatal: re.Pattern[str]) -> bool:
    behind = [line.text for name, line in lines if name == proof.file and line.number > (proof.line or 0)]
    told = [text for text in behind if text.strip()]
    if sum(map(_gets_on, told)) < _GOOD_STEPS or any(fatal.search(text) for text in told):
        return False
    return any(map(_gets_on, told[-_END_LINES:]))


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

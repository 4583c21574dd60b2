"""Whether a run went on: before any failure, after a failure that it retried, or not even to its first step.

In: lines, an incident. Out: whether the run never started, whether it survived the incident.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from remote_agent.diagnose.last_words import is_progress

if TYPE_CHECKING:
    from remote_agent.diagnose.incidents import EvidenceLine, Incident
    from supervisor.postmortem.lines import FileLine

_MEETINGS = re.compile(
    r"\bCCL\b|\b[NR]CCL\b|nccl==|process[ _]group|distributed|rendezvous|c10d|world[ _]size|\bbarrier\b|waiting for",
    re.IGNORECASE,
)
# Every match contains one of these words: looking for words is much faster.
_OF_MEETINGS = ("ccl", "process", "distributed", "rendezvous", "c10d", "world", "barrier", "waiting for")
_UNCAUGHT = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|terminate called")
# Half-precision training sometimes reduces the scale of the loss: harmless if so many good steps follow.
_SKIPPED = re.compile(r"OVERFLOW! Rank \d+ Skipping step|\b(?:[Ll]oss|grad[_ ]norm)['\"]?[:=]? ?(?:nan|NaN)\b")
_OF_SKIPPED = ("OVERFLOW", "nan", "NaN")
_GOOD_STEPS = 10
# After one of these, other lines only quote the process that has ended.
_ENDS = re.compile(
    r"exit ?code|[Ee]xited with|return code|terminated with|[Kk]illed|CANCELLED|[Rr]estart|[Ss]ignal \d|core dumped"
    r"|Connection (?:reset|closed)|^srun: |^slurmstepd: "
)
_END_LINES = 10
# These are retried, mostly with success.
_TRIED_AGAIN = ("rendezvous_timeout", "gloo_connection_reset")


def never_started(lines: Iterable[str]) -> bool:
    """Whether the text ends while the ranks meet each other, before any step."""
    meets = False
    for text in lines:
        if is_progress(text):
            return False
        meets = meets or _matches(text, _OF_MEETINGS, _MEETINGS)
    return meets


def _matches(text: str, words: Iterable[str], expression: re.Pattern[str]) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in words) and expression.search(text) is not None


def was_retried(incident: Incident, files: Iterable[tuple[str, FileLine]]) -> bool:
    """Whether the incident is only lost connections or skipped steps, and the run made progress after them."""
    if incident.evidence and all(_SKIPPED.search(each.text) for each in incident.evidence):
        return _recovered(line for _, line in files)
    if incident.category not in _TRIED_AGAIN or any(each.category not in _TRIED_AGAIN for each in incident.victims):
        return False
    went_on: dict[str, int] = {}
    for name, line in files:
        if _UNCAUGHT.search(line.text):
            return False
        if is_progress(line.text):
            went_on[name] = line.number
    return all((each.line or 0) < went_on.get(each.file or "", 0) for each in incident.evidence)


def was_survived(incident: Incident, ranks: Mapping[int | None, Sequence[tuple[str, FileLine]]]) -> bool:
    """Whether every rank of the evidence went on training to the end of its text, in which no process ended."""
    if incident.exit_code is not None or incident.exit_signal is not None or not incident.evidence:
        return False
    fatal = _SKIPPED if incident.category == "nan_loss" else _ENDS
    return all(_went_on(ranks.get(each.rank, ()), each, fatal) for each in incident.evidence)


def _went_on(lines: Sequence[tuple[str, FileLine]], proof: EvidenceLine, fatal: re.Pattern[str]) -> bool:
    after = [line.text for name, line in lines if name == proof.file and line.number > (proof.line or 0)]
    texts = [text for text in after if text.strip()]
    if sum(map(is_progress, texts)) < _GOOD_STEPS or any(fatal.search(text) for text in texts):
        return False
    return any(map(is_progress, texts[-_END_LINES:]))


def without_recovered(lines: list[FileLine]) -> list[FileLine]:
    """Return the lines without skipped steps that training recovered from: a later failure has another cause."""
    if not any(_skipped(line.text) for line in lines) or not _recovered(lines):
        return lines
    return [line for line in lines if not _skipped(line.text)]


def _skipped(text: str) -> bool:
    return any(word in text for word in _OF_SKIPPED) and _SKIPPED.search(text) is not None


def _recovered(lines: Iterable[FileLine]) -> bool:
    """Whether enough good steps follow the last skipped one."""
    good = 0
    for line in lines:
        if _skipped(line.text):
            good = 0
        elif is_progress(line.text):
            good += 1
    return good >= _GOOD_STEPS

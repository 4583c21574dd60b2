"""Training progress read from the lines, without any change of the script.

In: new bytes of a rank's streams. Out: the last step it named, the time of its last output, its figures, the first
loss that is no number, the step of the last snapshot that it spoke of.

Only the last matching text of each batch is parsed, found by a search from its end, so that a flood stays cheap.

A bar that is full before the rank has printed any loss may have been no training (a data set's tokens, a checkpoint's
shards): whatever counts after it is believed.
"""

from __future__ import annotations

import re

from remote_agent.logs.figures import Figures

# (what to find from the end, what must stand there), the best source first: once a better one was seen,
# a worse one is no longer believed (an epoch is not a step).
# A number at the very end of what has arrived may not be whole yet: something must follow it.
_NUMBER = rb"(\d{1,15})(?=[^\d.]|\.(?!\d)[\s\S])"
# A colour's code ends with a letter.
_BEGIN = rb"(?:(?<![A-Za-z_])|(?<=\x1b\[\d\dm))"
_BETWEEN = rb"[\"']?\s{0,4}[=:#]?\s{0,8}[\[(]?\s{0,4}"
_KINDS: tuple[tuple[tuple[bytes, ...], re.Pattern[bytes]], ...] = (
    (
        (b"tep", b"TEP"),
        re.compile(_BEGIN + rb"(?:(?:global|current|train|training)[_ ]?)?step" + _BETWEEN + _NUMBER, re.I),
    ),
    ((b"ter", b"TER"), re.compile(rb"(?<![A-Za-z_])iter(?:ation)?" + _BETWEEN + _NUMBER, re.I)),
    ((b"%|",), re.compile(rb"\d%\|[^|\r\n]{0,400}\|\s*" + _NUMBER + rb"/(?P<total>\d+) \[")),
    ((b"poch", b"POCH"), re.compile(rb"(?<![A-Za-z_])epoch" + _BETWEEN + _NUMBER, re.I)),
)
# Longest text before the found letters that belongs to the match ("training_s"), and longest match after them.
_BEFORE = 16
_AFTER = 512
_TRIES = 24
# Not the best loss so far, which begins as inf, and not a loss scale.
_NOT_FINITE = re.compile(
    rb"(?<![\w/.-])(?!\S*(?:best|min|prev|last|lowest|init))(?P<name>[\w/.-]{0,40}loss(?:_(?!scale)\w{1,16})?)[\"']?"
    rb"(?:[ \t]{0,4}[=:]|[ \t]{1,4}is|[ \t])[ \t]{0,4}(?:tensor\()?(?P<value>[-+]?(?:nan|inf(?:inity)?))(?![\w.%-])",
    re.I,
)
# `saved snapshot.pt`, `Saving model checkpoint to out/checkpoint-500`, `resumed from snapshot.pt: step=20`.
_SNAPSHOT = re.compile(
    rb"(?=.*?(?:snapshot|checkpoint|ckpt|\.pth?\b))(?!.*?\b(?:not|fail\w*|error|unable|skip\w*)\b)"
    rb".*?\b(?:(?P<old>resum)|sav)(?:ed|ing)\b",
    re.I,
)
_SNAPSHOT_MARKS = (b"sav", b"Sav", b"esum")
_NAN_MARKS = (b"nan", b"NaN", b"inf", b"Inf")
_NAME_BYTES = 80


def _last_number(data: bytes, marks: tuple[bytes, ...], pattern: re.Pattern[bytes]) -> int | None:
    found = _last_match(data, marks, pattern)
    return None if found is None else int(found[1])


def _last_match(data: bytes, marks: tuple[bytes, ...], pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
    stop = len(data)
    # One letter is found ten times as fast as a word.
    marks = tuple(mark for mark in marks if mark[-1:] in data)
    for _ in range(_TRIES):
        found = -1
        for mark in marks:
            found = max(found, data.rfind(mark, found + 1, stop))
        if found < 0:
            return None
        begin = max(0, found - _BEFORE)
        # The window keeps the byte before the word: the pattern looks at it.
        last = None
        for last in pattern.finditer(data, begin, min(len(data), found + _AFTER)):
            if last.end() > found:
                break
        if last is not None:
            return last
        stop = found
    return None


def _not_finite(data: bytes) -> str:
    """Return `loss is nan` where the text says so; of very many suspicious places only the last are looked at."""
    for mark in _NAN_MARKS:
        if mark[-1:] not in data:
            continue
        stop = len(data)
        for _ in range(_TRIES):
            stop = data.rfind(mark, 0, stop)
            if stop < 0:
                break
            begin = max(0, data.rfind(b"\n", 0, stop) + 1, stop - _NAME_BYTES)
            found = _NOT_FINITE.search(data, begin, min(len(data), stop + _BEFORE))
            if found is not None:
                return f"{found['name'].decode(errors='replace')} is {found['value'].decode().lower()}"
    return ""


def _snapshot(data: bytes, marks: tuple[bytes, ...], pattern: re.Pattern[bytes], step: int | None) -> int | None:
    """Return the step of the last snapshot that whole lines speak of; `step`: the one before this text."""
    stop = len(data)
    spoken = [mark for mark in _SNAPSHOT_MARKS if mark[-1:] in data]
    for _ in range(_TRIES):
        stop = max((data.rfind(mark, 0, stop) for mark in spoken), default=-1)
        if stop < 0:
            break
        begin, end = data.rfind(b"\n", 0, stop) + 1, data.find(b"\n", stop)
        said = _SNAPSHOT.match(data, max(begin, stop - _AFTER), min(end, stop + _AFTER)) if end > 0 else None
        if said is not None:
            found = _last_number(data[begin : end + 1], marks, pattern)
            if found is None and said["old"] is None:
                before = _last_number(data[:begin], marks, pattern)
                found = step if before is None else before
            if found is not None:
                return found
    return None


class StepReader:
    """Progress of one rank over its streams."""

    __slots__ = ("_carry", "_kind", "figures", "last_output_ns", "saved", "step", "warning")

    def __init__(self) -> None:
        self.step: int | None = None
        self.warning: str | None = None
        """The first loss that was no number, and when: `loss is nan, about step 120`."""
        self.saved: int | None = None
        """The step of the last snapshot that it says to have saved, or to go on from."""
        self.last_output_ns: int | None = None
        self.figures = Figures(self._step_in)
        self._kind = len(_KINDS)
        self._carry: dict[str, bytes] = {}

    def _step_in(self, line: bytes) -> int | None:
        return _last_number(line, *_KINDS[self._kind]) if self._kind < len(_KINDS) else None

    def _count(self, data: bytes, t_ns: int | None) -> int | None:
        """Take the newest step in; return the one before it, None where that counted something else."""
        before = self.step
        for kind, (marks, pattern) in enumerate(_KINDS[: self._kind + 1]):
            found = _last_match(data, marks, pattern)
            if found is None:
                continue
            if kind != self._kind:
                # What was counted before is none of these.
                self.saved = before = None
            self.step, self._kind = int(found[1]), kind
            self.figures.note_step(self.step, t_ns)
            if found.groupdict().get("total") != found[1] or self.figures.told()["loss"] is not None:
                break
            self._kind, data = len(_KINDS), data[found.end() :]
            self.figures.forget_steps()
        return before

    def feed(self, stream: str, data: bytes, t_ns: int | None) -> None:
        """Take new bytes of one stream; t_ns: their arrival."""
        if not data:
            return
        if t_ns is not None and (self.last_output_ns is None or t_ns > self.last_output_ns):
            self.last_output_ns = t_ns
        self.figures.feed(stream, data)
        carry = self._carry.get(stream)
        if carry:
            data = carry + data
        last = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._carry[stream] = data[max(last, len(data) - _AFTER) :]
        before = self._count(data, t_ns)
        if stream != "nccl" and self._kind < len(_KINDS):
            found = _snapshot(data, *_KINDS[self._kind], before)
            self.saved = self.saved if found is None else found
        if self.warning is None and stream != "nccl":
            said = _not_finite(data)
            if said:
                self.warning = said if self.step is None else f"{said}, about step {self.step}"

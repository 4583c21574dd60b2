"""Training progress, read from a rank's output without any change to the script.

In: new bytes of a rank's streams, and what its script wrote for us (SUPERVISOR_METRICS). Out: the last step it printed
and of how many, the time of its last output, its figures, the first loss that is not finite, and the step of the last
snapshot it mentioned.

Only the last match in each batch is parsed; it is searched for from the end, so that a flood stays cheap.

A progress bar that fills up before the rank has printed any loss may not have been training (tokenizing a data set,
loading the shards of a checkpoint): any counter that follows replaces it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Union

# Only the end of the new bytes is parsed: the newest figures stand there.
LOOK_BACK = 2048
# Steps per second are computed from this many moments, at least this far apart.
MOMENTS = 8
APART_NS = 2_000_000_000
# Losses of single steps between two heartbeats: how many are sent, and how many are kept to choose from.
MAX_LOSSES, MAX_KEPT = 4, 256

_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_FIGURE = rb"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,15})?(?:[eE][+-]?\d{1,3})?|[+-]?(?:nan|inf)"
# A number at the very end of the data may be incomplete: another character must follow it.
_WHOLE = rb"(?![\w.+-])(?=[\s\S])"
_IS = rb"[\"']?\s{0,4}[=:]?\s{0,8}"
# A validation loss or one term of the loss does not match.
_ASIDE = b"".join(rb"(?<!%s )" % word for word in (b"val", b"valid", b"validation", b"eval", b"test", b"aux"))
_LOSS = re.compile(
    rb"(?<![A-Za-z_/.-])" + _ASIDE + rb"(?:(?:train(?:ing)?|lm|total|avg|mean)[ _/.-])?loss"
    + _IS + rb"(" + _FIGURE + rb")" + _WHOLE, re.I,
)  # fmt: skip
# Behind such a word, a loss is of an evaluation, and each rank may evaluate on other data.
_EVALUATES = re.compile(rb"(?<![A-Za-z])(?:e?val(?:id(?:ation|ating)?|uat\w+)?|test(?:ing)?)(?![A-Za-z])", re.I)
# These are the learning rate and the norm of the gradients, also in brackets with one value for each parameter group.
_OTHERS = {
    "lr": re.compile(
        rb"(?<![A-Za-z_/.-])(?:lr|learning[ _]rate)" + _IS + rb"\[?\s{0,4}(" + _FIGURE + rb")" + _WHOLE, re.I
    ),
    "grad_norm": re.compile(
        rb"(?<![A-Za-z_/.-])(?:grad(?:ient)?[ _]?norm|gnorm)" + _IS + rb"(" + _FIGURE + rb")" + _WHOLE, re.I
    ),
}
_OTHERS_MARKS = (b"lr", b"LR", b"earning", b"norm", b"Norm")
_THINGS = (
    rb"(?P<things>tok|tokens?|samples?|sequences?|examples?|images?|img|it|iters?|iterations?|steps?|batch(?:es)?)"
)
_PER_S = rb"(?:/s(?:ec(?:onds?)?)?|[_ ]per[_ ]sec(?:ond)?)(?![A-Za-z])"
_AMOUNT = rb"(?P<number>" + _FIGURE + rb")"
_KEY = rb"[\"']?\s{0,4}[=:]\s{0,8}"
_RATES = (
    re.compile(rb"(?<![\w.+-])" + _AMOUNT + rb"\s?" + _THINGS + _PER_S + rb"(?!" + _KEY + rb")", re.I),
    re.compile(rb"(?<![A-Za-z])" + _THINGS + _PER_S + _KEY + _AMOUNT + _WHOLE, re.I),
    re.compile(rb"(?<![A-Za-z])(?P<things>tps)" + _KEY + _AMOUNT + _WHOLE, re.I),
)
_UNITS = {
    b"to": "tok/s",
    b"tp": "tok/s",
    b"sa": "samples/s",
    b"se": "samples/s",
    b"ex": "samples/s",
    b"im": "samples/s",
}
# The best unit first: once it was seen, worse units are ignored.
_BEST = ("tok/s", "samples/s", "it/s")
# A progress bar of tqdm that has reached its end.
_BAR = b"%|"
_FULL_BAR = re.compile(rb"\d%\|[^|\r\n]{0,400}\|\s*(\d[\w.]{0,15})/\1 \[")
Number = Union[float, str]
# The largest number that a script may write for us: it must fit the wire.
_MOST = 10**15

# A script may write such lines into the file that SUPERVISOR_METRICS names to each rank; each field is optional:
# `{"step": 803, "total": 2000, "loss": 1.9, "lr": 3e-4, "grad_norm": 0.7, "rate": 41000, "unit": "tok/s"}`.
REPORTS = "metrics.jsonl"
# Only the end of the new lines is read.
REPORTS_LOOK_BACK = 65_536


class Figures:
    """Loss, learning rate, norm of the gradients, rate and steps per second of one rank."""

    __slots__ = (
        *("_fresh", "_is_bars", "_last_loss_step", "_loss", "_losses", "_moments", "_others", "_rate", "_reported"),
        "_step_in",
    )

    def __init__(self, step_in: Callable[[bytes], int | None]) -> None:
        self._step_in = step_in
        """Returns the step that a line names."""
        self._last_loss_step: int | None = None
        self._losses: deque[tuple[int, str]] = deque(maxlen=MAX_KEPT)
        self._loss: Number | None = None
        self._others: dict[str, Number | None] = dict.fromkeys(_OTHERS)
        self._rate: tuple[float, str] | None = None
        self._reported: dict[str, Number | None] = {}
        """What the script wrote for us."""
        self._is_bars = False
        """The rate was read from a progress bar."""
        self._fresh: dict[str, bytes] = {}
        self._moments: deque[tuple[int, int]] = deque(maxlen=MOMENTS)

    def feed(self, stream: str, data: bytes) -> None:
        """Add new bytes of one stream."""
        self._fresh[stream] = (self._fresh.get(stream, b"") + data[-LOOK_BACK:])[-LOOK_BACK:]

    def note_step(self, step: int, t_ns: int | None) -> None:
        """Add the newest step and its time of arrival."""
        if t_ns is None:
            return
        if self._moments and step < self._moments[-1][1]:
            self.forget_steps()
        if len(self._moments) < 2 or t_ns - self._moments[-2][0] >= APART_NS:
            self._moments.append((t_ns, step))
        else:
            self._moments[-1] = (t_ns, step)

    def forget_steps(self) -> None:
        """Drop the steps so far: they counted something else."""
        self._moments.clear()

    def values(self) -> dict[str, Number | None]:
        """Return loss, lr, grad_norm (`nan` and `inf` as words, which JSON lacks), rate, unit, and steps_s."""
        for stream, data in self._fresh.items():
            plain = _COLOUR.sub(b"", data)
            self._read(plain)
            self._note_losses(plain, len(data) >= LOOK_BACK)
            # An incomplete line is parsed again when it is complete.
            self._fresh[stream] = data[max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 :]
        rate, unit = self._rate or (None, None)
        figures = {"loss": self._loss, **self._others, "rate": rate, "unit": unit, "steps_s": self._steps_s()}
        return {**figures, **self._reported}

    def take_report(self, values: Mapping[str, object]) -> Number | None:
        """Take figures that the script wrote for us, which replace those in its output; returns its loss."""
        plain = {name: _plain(values.get(name)) for name in ("loss", *_OTHERS, "rate")}
        own = {name: value for name, value in plain.items() if value is not None}
        self._reported.update(own)
        unit = values.get("unit")
        if isinstance(unit, str) and unit in _BEST:
            self._reported["unit"] = unit
        return own.get("loss")

    def take_losses(self) -> list[tuple[int, str]]:
        """Return (step, printed loss) of the roundest steps since the last call.

        Round steps are chosen so that ranks that are asked at different moments return the same steps.
        """
        self.values()
        losses = sorted(self._losses, key=lambda pair: pair[0] & -pair[0])[-MAX_LOSSES:]
        self._losses.clear()
        return losses

    def _read(self, data: bytes) -> None:
        for match in _LOSS.finditer(data):
            self._loss = _number(match[1])
        for name, pattern in _OTHERS.items() if any(mark in data for mark in _OTHERS_MARKS) else ():
            for match in pattern.finditer(data):
                self._others[name] = _number(match[1])
        for line in data.splitlines(keepends=True) if _BAR in data else (data,):
            is_bar = _BAR in line
            if is_bar and _FULL_BAR.search(line):
                # Its work is done: what follows, perhaps in a worse unit, has its own rate.
                self._rate = None if self._is_bars else self._rate
            else:
                self._read_rate(line, is_bar)

    def _read_rate(self, line: bytes, is_bar: bool) -> None:
        for pattern in _RATES:
            for match in pattern.finditer(line):
                unit, number = _UNITS.get(match["things"][:2].lower(), "it/s"), _number(match["number"])
                if isinstance(number, float) and (not self._rate or _BEST.index(unit) <= _BEST.index(self._rate[1])):
                    self._rate, self._is_bars = (number, unit), is_bar

    def _note_losses(self, data: bytes, is_cut: bool) -> None:
        """Add the first training loss of each step named on a complete line; is_cut: earlier bytes are missing."""
        losses = []
        for line in data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1].splitlines(keepends=True):
            match = _LOSS.search(line)
            if match is None or _EVALUATES.search(line, 0, match.start()):
                continue
            step = self._step_in(line)
            if step is None or step == self._last_loss_step:
                continue
            self._last_loss_step = step
            losses.append((step, match[1].decode("ascii").replace(",", "")))
        # The first step here may have had a loss on an earlier line.
        whole = losses[1:] if is_cut else losses
        self._losses += [(step, loss) for step, loss in whole if loss.lower().lstrip("+-") not in ("nan", "inf")]

    def _steps_s(self) -> float | None:
        """Return recent steps per second; None before the second step."""
        if len(self._moments) < 2:
            return None
        (begin_ns, first), (end_ns, last) = self._moments[0], self._moments[-1]
        return round((last - first) / (end_ns - begin_ns) * 1e9, 4) if end_ns > begin_ns and last > first else None


def _number(text: bytes) -> Number:
    word = text.decode("ascii").lower().lstrip("+").replace(",", "")
    return word if word.lstrip("-") in ("nan", "inf") else float(word)


def _plain(value: Any) -> Number | None:
    """Return a number of a script's report; nan and inf as words."""
    if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf"):
        return value.lower().lstrip("+")
    if type(value) not in (int, float) or (type(value) is int and abs(value) > _MOST):
        return None
    number = float(value)
    return number if math.isfinite(number) else str(number)


# Each entry has the letters to search for from the end and the pattern that must match there. The best source is first:
# once it was seen, worse ones are ignored (an epoch is not a step).
# A number at the very end of the data may be incomplete: another character must follow it.
_NUMBER = rb"(\d{1,15})(?=[^\d.]|\.(?!\d)[\s\S])"
# An escape code for a colour ends with a letter.
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
# These are places in the table: lines that name a step, and progress bars.
_STEPS, _BARS = (0, 1), 2
# The total number of steps is printed as `803/2000`, `803 of 2000` or `[803/2000]`.
_TOTAL = re.compile(rb"\s{0,3}(?:/|of(?=\s))\s{0,3}(\d{1,15})(?![\d.])(?=[\s\S])")
# Behind this, a step may be one of the epoch and not of the training.
_OF_EPOCH = re.compile(rb"epoch[^\r\n]{0,16}?\d+\s{0,3}(?:/|of)\s{0,3}\d|epoch[^\r\n%]{0,24}\d%\|", re.I)
# A step that the script itself writes for us is better than all of these.
_REPORTED = -1
# A match has at most this many bytes before the letters searched for ("training_s"), and after them.
_BEFORE = 16
_AFTER = 512
# So many bytes of the last line are kept.
MAX_SAID = 200
_TRIES = 24
# The best loss so far (it starts as inf) and a loss scale do not count.
_NOT_FINITE = re.compile(
    rb"(?<![\w/.-])(?!\S*(?:best|min|prev|last|lowest|init))(?P<name>[\w/.-]{0,40}loss(?:_(?!scale)\w{1,16})?)[\"']?"
    rb"(?:[ \t]{0,4}[=:]|[ \t]{1,4}is|[ \t])[ \t]{0,4}(?:tensor\()?(?P<value>[-+]?(?:nan|inf(?:inity)?))(?![\w.%-])",
    re.I,
)
# It matches `saved snapshot.pt`, `Saving model checkpoint to out/checkpoint-500`, `resumed from snapshot.pt: step=20`.
_SNAPSHOT = re.compile(
    rb"(?=.*?(?:snapshot|checkpoint|ckpt|\.pth?\b))(?!.*?\b(?:not|fail\w*|error|unable|skip\w*)\b)"
    rb".*?\b(?:(?P<old>resum)|sav)(?:ed|ing)\b",
    re.I,
)
# A line that names the step to begin with, as that of a snapshot, is not printed after a step.
_BEGINS = re.compile(rb"resum|load|restored|restoring|start|begin", re.I)
_SNAPSHOT_MARKS = (b"sav", b"Sav", b"esum")
_NAN_MARKS = (b"nan", b"NaN", b"inf", b"Inf")
_NAME_BYTES = 80


def _last_number(data: bytes, marks: tuple[bytes, ...], pattern: re.Pattern[bytes]) -> int | None:
    match = _last_match(data, marks, pattern)
    return None if match is None else int(match[1])


def _last_match(data: bytes, marks: tuple[bytes, ...], pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
    stop = len(data)
    # One letter is found ten times as fast as a word.
    marks = tuple(mark for mark in marks if mark[-1:] in data)
    for _ in range(_TRIES):
        position = -1
        for mark in marks:
            position = max(position, data.rfind(mark, position + 1, stop))
        if position < 0:
            return None
        begin = max(0, position - _BEFORE)
        # The window keeps the byte before the word: the pattern looks at it.
        last = None
        for last in pattern.finditer(data, begin, min(len(data), position + _AFTER)):
            if last.end() > position:
                break
        if last is not None:
            return last
        stop = position
    return None


def _not_finite(data: bytes) -> str:
    """Return `loss is nan` if the text says so; only the last suspicious places are checked."""
    for mark in _NAN_MARKS:
        if mark[-1:] not in data:
            continue
        stop = len(data)
        for _ in range(_TRIES):
            stop = data.rfind(mark, 0, stop)
            if stop < 0:
                break
            begin = max(0, data.rfind(b"\n", 0, stop) + 1, stop - _NAME_BYTES)
            match = _NOT_FINITE.search(data, begin, min(len(data), stop + _BEFORE))
            # A word at the very end may go on with the next bytes, and is read again then.
            if match is not None and match.end() < len(data):
                return f"{match['name'].decode(errors='replace')} is {match['value'].decode().lower()}"
    return ""


def _snapshot(data: bytes, marks: tuple[bytes, ...], pattern: re.Pattern[bytes], step: int | None) -> int | None:
    """Return the step of the last snapshot that a complete line mentions; `step`: the step before this text."""
    stop = len(data)
    spoken = [mark for mark in _SNAPSHOT_MARKS if mark[-1:] in data]
    for _ in range(_TRIES):
        stop = max((data.rfind(mark, 0, stop) for mark in spoken), default=-1)
        if stop < 0:
            break
        begin, end = data.rfind(b"\n", 0, stop) + 1, data.find(b"\n", stop)
        mention = _SNAPSHOT.match(data, max(begin, stop - _AFTER), min(end, stop + _AFTER)) if end > 0 else None
        if mention is not None:
            saved = _last_number(data[begin : end + 1], marks, pattern)
            if saved is None and mention["old"] is None:
                before = _last_number(data[:begin], marks, pattern)
                saved = step if before is None else before
            if saved is not None:
                return saved
    return None


class StepReader:
    """Reads the progress of one rank from its streams."""

    __slots__ = (
        *("_carry", "_counts_parts", "_first_bar_ns", "_first_step_ns", "_kind", "figures", "last_output_ns", "saved"),
        *("said", "step", "total", "warning"),
    )

    def __init__(self) -> None:
        self.step: int | None = None
        self.total: int | None = None
        """The number of steps of the whole training; None where that is not certain."""
        self.warning: str | None = None
        """The first loss that was not finite, and when: `loss is nan, about step 120`."""
        self.saved: int | None = None
        """The step of the last snapshot that it saved or resumed from."""
        self.last_output_ns: int | None = None
        self.said: str | None = None
        """The last whole line that it has printed, its first 200 bytes."""
        self.figures = Figures(self._step_in)
        self._first_step_ns: int | None = None
        self._first_bar_ns: int | None = None
        """The time when the progress bar that is shown first counted something."""
        self._kind = len(_KINDS)
        self._counts_parts = False
        """The steps started over: they do not count the whole training."""
        self._carry: dict[str, bytes] = {}

    @property
    def first_step_ns(self) -> int | None:
        """The time of its first step; a progress bar counts steps only if a loss was printed, an epoch is none."""
        if self._first_step_ns is None and self.figures.values()["loss"] is not None:
            return self._first_bar_ns
        return self._first_step_ns

    def _note_first(self, data: bytes, match: re.Match[bytes], t_ns: int | None) -> None:
        begin, end = data.rfind(b"\n", 0, match.start()) + 1, data.find(b"\n", match.end())
        if self._kind in _STEPS and not _BEGINS.search(data, begin, end if end >= 0 else len(data)):
            self._first_step_ns = self._first_step_ns or t_ns
        elif self._kind == _BARS and 0 < int(match[1]) < int(match["total"]):
            self._first_bar_ns = self._first_bar_ns or t_ns

    def _step_in(self, line: bytes) -> int | None:
        return _last_number(line, *_KINDS[self._kind]) if 0 <= self._kind < len(_KINDS) else None

    def take_report(self, values: Mapping[str, object], t_ns: int) -> None:
        """Take what the script wrote into SUPERVISOR_METRICS: from then on its steps are not read from its output."""
        step, total = values.get("step"), values.get("total")
        if type(step) is int and 0 <= step <= _MOST:
            if self._kind != _REPORTED:
                self.figures.forget_steps()
            self.step, self._kind = step, _REPORTED
            self._first_step_ns = self._first_step_ns or t_ns
            self.figures.note_step(step, t_ns)
        if type(total) is int and 0 < total <= _MOST:
            self.total = total
        loss = self.figures.take_report(values)
        if self.warning is None and isinstance(loss, str):
            self.warning = f"loss is {loss}" if self.step is None else f"loss is {loss}, about step {self.step}"
        self.last_output_ns = max(t_ns, self.last_output_ns or t_ns)

    def _count(self, data: bytes, t_ns: int | None) -> int | None:
        """Read the newest step; returns the one before it, or None if that counted something else."""
        before = self.step
        for kind, (marks, pattern) in enumerate(_KINDS[: self._kind + 1]):
            match = _last_match(data, marks, pattern)
            if match is None:
                continue
            if kind != self._kind:
                # Earlier counts came from another source.
                self.saved = before = None
                self.total, self._counts_parts = None, False
            self._note_total(data, match, int(match[1]) if kind == self._kind else None)
            self.step, self._kind = int(match[1]), kind
            self.figures.note_step(self.step, t_ns)
            if self._first_step_ns is None:
                self._note_first(data, match, t_ns)
            if match.groupdict().get("total") != match[1] or self.figures.values()["loss"] is not None:
                break
            self._kind, data = len(_KINDS), data[match.end() :]
            self.figures.forget_steps()
            self._first_bar_ns = None
        return before

    def _note_total(self, data: bytes, match: re.Match[bytes], step: int | None) -> None:
        """Read of how many steps the newest one is; `step`: it, if it counts what the steps before counted."""
        # Only a step far behind counts: the step of a snapshot may be printed after a newer one.
        self._counts_parts |= step is not None and self.step is not None and 2 * step < self.step
        printed = match.groupdict().get("total")
        after = None if printed else _TOTAL.match(data, match.end())
        total = int(printed or (after[1] if after else 0))
        begin = max(data.rfind(b"\n", 0, match.start()), data.rfind(b"\r", 0, match.start())) + 1
        is_part = self._counts_parts or _OF_EPOCH.search(data, begin, match.end())
        if total or is_part:
            self.total = total if total >= int(match[1]) and not is_part else None

    def feed(self, stream: str, data: bytes, t_ns: int | None) -> None:
        """Read new bytes of one stream; t_ns: their time of arrival."""
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
        if stream != "nccl" and (lines := data[:last].rstrip()):
            begin = max(lines.rfind(b"\n"), lines.rfind(b"\r")) + 1
            self.said = lines[begin : begin + MAX_SAID].decode("utf-8", "replace").strip()
        before = self._count(data, t_ns)
        if stream != "nccl" and 0 <= self._kind < len(_KINDS):
            saved = _snapshot(data, *_KINDS[self._kind], before)
            self.saved = self.saved if saved is None else saved
        if self.warning is None and stream != "nccl":
            warning = _not_finite(data)
            if warning:
                self.warning = warning if self.step is None else f"{warning}, about step {self.step}"


class Reports:
    """What scripts write of their progress for us: how far each rank's file was read."""

    def __init__(self) -> None:
        self._read: dict[Path, int] = {}

    def read(self, directory: Path, steps: StepReader) -> None:
        """Give what is new in a rank's file to the reader of its progress."""
        path = directory / REPORTS
        try:
            facts = os.stat(path)
        except OSError:
            return
        at = self._read.get(path, 0)
        # A file that the script has truncated is read from its start.
        at = 0 if facts.st_size < at else at
        if facts.st_size == at:
            return
        try:
            with open(path, "rb") as file:
                file.seek(max(at, facts.st_size - REPORTS_LOOK_BACK))
                data = file.read(REPORTS_LOOK_BACK)
                end = file.tell() - len(data) + data.rfind(b"\n") + 1
        except OSError:
            return
        # The last line may still be written.
        self._read[path] = max(at, end)
        if values := _values(data[: data.rfind(b"\n") + 1]):
            steps.take_report(values, facts.st_mtime_ns)


def _values(data: bytes) -> dict[str, object]:
    """Return the newest value of each field."""
    values: dict[str, object] = {}
    for line in data.splitlines():
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(report, dict):
            values.update(report)
    return values

"""Loss and throughput as the script prints them, and steps a second as they come.

In: new bytes of a rank's streams, its steps. Out: the newest loss, the newest rate with its unit, steps a second; the
losses of some steps, for a comparison with other ranks.

Bytes are only kept when they come; they are read when somebody asks, about once a second, so that a flood stays cheap.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Union

# Of what has come since the last look only the end is read: what is newest stands there.
LOOK_BACK = 2048
# Steps a second are those of this many moments, at least this far apart.
MOMENTS = 8
APART_NS = 2_000_000_000
# Losses of single steps, from one heartbeat to the next: what is told, and what is chosen from.
MAX_LOSSES, MAX_KEPT = 4, 256

_COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
_NUMBER = rb"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,15})?(?:[eE][+-]?\d{1,3})?|[+-]?(?:nan|inf)"
# A number at the very end of what has arrived may not be whole yet: something that is not of it must follow.
_WHOLE = rb"(?![\w.+-])(?=[\s\S])"
_IS = rb"[\"']?\s{0,4}[=:]?\s{0,8}"
# Not what is measured beside the training, nor a part of the loss.
_ASIDE = b"".join(rb"(?<!%s )" % word for word in (b"val", b"valid", b"validation", b"eval", b"test", b"aux"))
_LOSS = re.compile(
    rb"(?<![A-Za-z_/.-])" + _ASIDE + rb"(?:(?:train(?:ing)?|lm|total|avg|mean)[ _/.-])?loss"
    + _IS + rb"(" + _NUMBER + rb")" + _WHOLE, re.I,
)  # fmt: skip
# Before a loss in its line: each rank may have data of its own to evaluate with.
_EVALUATES = re.compile(rb"(?<![A-Za-z])(?:e?val(?:id(?:ation|ating)?|uat\w+)?|test(?:ing)?)(?![A-Za-z])", re.I)
_THINGS = (
    rb"(?P<things>tok|tokens?|samples?|sequences?|examples?|images?|img|it|iters?|iterations?|steps?|batch(?:es)?)"
)
_PER_S = rb"(?:/s(?:ec(?:onds?)?)?|[_ ]per[_ ]sec(?:ond)?)(?![A-Za-z])"
_AMOUNT = rb"(?P<number>" + _NUMBER + rb")"
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
# The best one first: once it was seen, another one is no longer believed.
_BEST = ("tok/s", "samples/s", "it/s")
# A bar of tqdm, its newest state being that all is done.
_BAR = b"%|"
_FULL_BAR = re.compile(rb"\d%\|[^|\r\n]{0,400}\|\s*(\d[\w.]{0,15})/\1 \[")
Number = Union[float, str]


class Figures:
    """What one rank's lines tell beside its step."""

    __slots__ = ("_fresh", "_is_bars", "_loss", "_losses", "_moments", "_rate", "_step_in", "_step_told")

    def __init__(self, step_in: Callable[[bytes], int | None]) -> None:
        self._step_in = step_in
        """Finds the step in a line."""
        self._step_told: int | None = None
        self._losses: deque[tuple[int, str]] = deque(maxlen=MAX_KEPT)
        self._loss: Number | None = None
        self._rate: tuple[float, str] | None = None
        self._is_bars = False
        """The rate stood in a bar."""
        self._fresh: dict[str, bytes] = {}
        self._moments: deque[tuple[int, int]] = deque(maxlen=MOMENTS)

    def feed(self, stream: str, data: bytes) -> None:
        """Take new bytes of one stream."""
        self._fresh[stream] = (self._fresh.get(stream, b"") + data[-LOOK_BACK:])[-LOOK_BACK:]

    def note_step(self, step: int, t_ns: int | None) -> None:
        """Take the newest step in, which arrived then."""
        if t_ns is None:
            return
        if self._moments and step < self._moments[-1][1]:
            self.forget_steps()
        if len(self._moments) < 2 or t_ns - self._moments[-2][0] >= APART_NS:
            self._moments.append((t_ns, step))
        else:
            self._moments[-1] = (t_ns, step)

    def forget_steps(self) -> None:
        """What was counted so far were no steps."""
        self._moments.clear()

    def told(self) -> dict[str, Number | None]:
        """Return loss (`nan` and `inf` are words: JSON has no such number), rate, its unit, and steps_s."""
        for stream, data in self._fresh.items():
            plain = _COLOUR.sub(b"", data)
            self._read(plain)
            self._note_losses(plain, len(data) >= LOOK_BACK)
            # A line that has not wholly come is read again with its rest.
            self._fresh[stream] = data[max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 :]
        rate, unit = self._rate or (None, None)
        return {"loss": self._loss, "rate": rate, "unit": unit, "steps_s": self._steps_s()}

    def take_losses(self) -> list[tuple[int, str]]:
        """Return step and loss, as printed, of some steps since the last call: of the roundest.

        So ranks that are asked at other moments tell of the same steps.
        """
        self.told()
        losses = sorted(self._losses, key=lambda told: told[0] & -told[0])[-MAX_LOSSES:]
        self._losses.clear()
        return losses

    def _read(self, data: bytes) -> None:
        for match in _LOSS.finditer(data):
            self._loss = _number(match[1])
        for line in data.splitlines(keepends=True) if _BAR in data else (data,):
            is_bar = _BAR in line
            if is_bar and _FULL_BAR.search(line):
                # What it did is done: what comes next, perhaps in a worse unit, has a rate of its own.
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
        """Take the first training loss of each step that whole lines name; is_cut: what came before is not here."""
        found = []
        for line in data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1].splitlines(keepends=True):
            match = _LOSS.search(line)
            if match is None or _EVALUATES.search(line, 0, match.start()):
                continue
            step = self._step_in(line)
            if step is None or step == self._step_told:
                continue
            self._step_told = step
            found.append((step, match[1].decode("ascii").replace(",", "")))
        # A step may have another line with a loss, before the first one here.
        whole = found[1:] if is_cut else found
        self._losses += [(step, loss) for step, loss in whole if loss.lower().lstrip("+-") not in ("nan", "inf")]

    def _steps_s(self) -> float | None:
        """Steps a second of late; None before there were two."""
        if len(self._moments) < 2:
            return None
        (begin_ns, first), (end_ns, last) = self._moments[0], self._moments[-1]
        return round((last - first) / (end_ns - begin_ns) * 1e9, 4) if end_ns > begin_ns and last > first else None


def _number(text: bytes) -> Number:
    word = text.decode("ascii").lower().lstrip("+").replace(",", "")
    return word if word.lstrip("-") in ("nan", "inf") else float(word)

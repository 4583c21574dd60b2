"""The relevant lines of logs with their numbers, in bounded time and memory.

In: paths. Out: all lines of a short file; of a long one the relevant lines and its end.

A line is relevant if it contains one of the words in HOT, or is near such a line.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from remote_agent.text.rows import last_state
from supervisor.postmortem.lines import FileLine, clean

Progress = Callable[[int], None]
# Up to this many bytes in all, every line is read; beyond that only the relevant lines of long files.
WHOLE_BYTES = 1 << 20
# This many lines are kept of all files together, twice, and of a single file at most and at least.
KEPT_LINES = 40_000
KEPT_MAX, KEPT_MIN = 20_000, 100
END_LINES = 400
BLOCK = 1 << 20
LINE_MAX = 8192
# This many bytes are kept per line of a limit: a few thousand long lines would take minutes to diagnose.
LINE_MEAN = 200
# This many lines are kept before and after a relevant one; a traceback may be long.
BEFORE, AFTER = 4, 60
Numbered = tuple[int, bytes]
# A failure contains one of these words, and everything that the diagnosis needs is near it. Lines far from any of them
# are only counted.
HOT = (
    *(
        b"Traceback",
        b"rror",
        b"xception",
        b"nterrupt",
        b"atchdog",
        b"imed out",
        b"imes out",
        b"imeout",
        b"exitcode",
        b"return code",
    ),
    *(b"signal", b"ailed", b"ailure", b"kill", b"Kill", b"oom", b"bort", b" fault", b"orrupt", b"free", b"malloc"),
    *(b"rrno", b"No ", b"denied", b"refused", b"closed", b"Xid", b" nan", b"oss is", b"throwing"),
    *(b"ERROR", b"CCL", b"IBV_WC", b"SIG", b"DUE TO", b"CANCELLED", b"STATUS", b"ECC", b"OVERFLOW", b"SUCCEEDED"),
    *(b"successfully", b"equeue", b"reempt", b"ssing ranks"),
    # Who came, and who did not; a host that goes down.
    *(b"rrived", b"joined", b"reached", b"ntered", b"gistered", b"checked in", b"waits", b"aiting", b"eady ranks"),
    *(b"eartbeat", b"talled", b"bsent", b"no answer", b"GLOBAL_RANK", b"ink down", b"ink Down", b"eboot", b"hutdown"),
    *(b"victing", b"ordoned", b"docker ", b"podman ", b"Power", b"Stopping"),
)
# A kind of line that occurs so often in so many bytes is printed at each step of a training.
ROUTINE = 1000
PIECE = 16 << 20
_KNOWN_MAX = 100_000
# If a larger share of the lines of a block is new, remembering them is slower than searching them.
_NEW_SHARE = 0.5

# Most lines of a log differ only in numbers, punctuation and bars.
_BLANKS = b":='\"\t"
_SIGNS = bytes.maketrans(_BLANKS, b" " * len(_BLANKS))
_LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz \n" + _BLANKS)
_DROPPED = bytes(code for code in range(256) if code not in _LETTERS)
# Letters are in order from the rarest on; b is frequent because of hexadecimal numbers. Capitals are the rarest.
_RARE = b"zqjxkvpygfwmu"
_FREQUENT = b"bcldrhsnioate "
_FROM_RARE = _RARE + _FREQUENT
# A finder returns the position of the next match in a text from an index on; negative: none.
_Finder = Callable[[bytes, int], int]


def read_all(paths: Sequence[Path], progress: Progress = lambda _bytes: None) -> Generator[list[FileLine], None, None]:
    """Yield the relevant lines of each file, in order; raises OSError. `progress` gets the bytes just read."""
    sizes = [path.stat().st_size for path in paths]
    whole = WHOLE_BYTES // max(1, len(paths))
    kept = max(KEPT_MIN, min(KEPT_MAX, KEPT_LINES // max(1, len(paths))))
    for path, size in zip(paths, sizes, strict=True):
        if size > whole:
            yield _relevant(path, size, kept, progress)
        else:
            with path.open("rb") as file:
                yield [FileLine(number, _text(visible(raw.rstrip(b"\n")))) for number, raw in enumerate(file, 1)]
            progress(size)


def _relevant(path: Path, size: int, kept: int, progress: Progress) -> list[FileLine]:
    picker = _Picker(kept)
    with path.open("rb") as file:
        start = at = 0
        # The oldest bytes of one of our own logs may have been freed: they are a hole.
        with contextlib.suppress(OSError, AttributeError):
            start = os.lseek(file.fileno(), 0, os.SEEK_DATA)
        for block in _blocks(file, _line_start(file, start), size):
            picker.feed(block)
            progress(file.tell() - at)
            at = file.tell()
    progress(size - at)
    return picker.lines()


def _text(raw: bytes) -> str:
    return clean(raw.decode("utf-8", "replace"))


class FirstAndLast:
    """The first and the last of many lines, each once, in order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._first: list[Numbered] = []
        self._last: deque[Numbered] = deque()
        self._newest = -1
        self._first_room = self._last_room = limit * LINE_MEAN

    def add(self, line: Numbered) -> None:
        """Add a line, unless it or a later one has been added already."""
        if line[0] <= self._newest:
            return
        self._newest = line[0]
        size = len(line[1])
        if not self._last and len(self._first) < self._limit and size <= self._first_room:
            self._first.append(line)
            self._first_room -= size
            return
        self._last.append(line)
        self._last_room -= size
        while len(self._last) > self._limit or self._last_room < 0:
            self._last_room += len(self._last.popleft()[1])

    def lines(self) -> list[Numbered]:
        """Return the kept lines."""
        return [*self._first, *self._last]


def letters(text: bytes) -> bytes:
    """Return the letters of a text; equal letters are the same kind of line."""
    return text.translate(_SIGNS, _DROPPED)


def _finders(words: Iterable[bytes]) -> list[_Finder]:
    """Return the functions that together find any of these words in a text of letters.

    One expression finds all words with a rare letter: it starts there, so it stops at few positions of a text. Words of
    frequent letters are found faster one by one.
    """
    alone: list[_Finder] = []
    by_letter: dict[bytes, list[bytes]] = {}
    for word in words:
        at = min(range(len(word)), key=lambda index: _FROM_RARE.find(word[index]))
        if word[at] in _FREQUENT:
            alone.append(_finder(word))
        else:
            rest = word[at + 1 :] + (b"(?<=%s)" % word if at else b"")
            by_letter.setdefault(word[at : at + 1], []).append(rest)
    together = re.compile(b"|".join(b"%s(?:%s)" % (letter, b"|".join(rests)) for letter, rests in by_letter.items()))

    def first(text: bytes, begin: int) -> int:
        match = together.search(text, begin)
        return -1 if match is None else match.start()

    return [first, *alone]


def _finder(word: bytes) -> _Finder:
    return lambda text, begin: text.find(word, begin)


_FINDERS = _finders(map(letters, HOT))


def _hot_in(text: bytes) -> set[bytes]:
    """Return the lines of a text of letters that contain one of the words."""
    hot: set[bytes] = set()
    for find in _FINDERS:
        end = 0
        # A progress bar may have a thousand matches in one line: one is enough.
        while (place := find(text, end)) >= 0:
            end = text.find(b"\n", place)
            end = len(text) if end < 0 else end
            hot.add(text[text.rfind(b"\n", 0, place) + 1 : end])
    return hot


class LineScan:
    """Finds the relevant lines block by block; remembers the kinds of lines while most are alike."""

    def __init__(self) -> None:
        self._alike = True
        self._cold: set[bytes] = set()
        self._hot: Counter[bytes] = Counter()

    def hot(self, block: bytes) -> list[int]:
        """Return the indexes of the relevant lines, up to a number of each kind."""
        if len(self._cold) + len(self._hot) > _KNOWN_MAX:
            self._cold.clear()
            self._hot.clear()
        text = letters(block)
        hot = self._hot_of_new(text) if self._alike else _hot_in(text) - self._cold
        if not hot:
            return []
        kinds = text.split(b"\n")
        indexes = [index for index, kind in enumerate(kinds) if kind in hot]
        self._hot.update(kinds[index] for index in indexes)
        self._cold.update(kind for kind in hot if self._hot[kind] >= ROUTINE)
        return indexes

    def _hot_of_new(self, text: bytes) -> set[bytes]:
        """Return the kinds of lines with one of the words, without searching known kinds again."""
        kinds = text.split(b"\n")
        new = set(kinds) - self._cold
        self._alike = len(new) <= _NEW_SHARE * len(kinds)
        hot = _hot_in(b"\n".join(new)) if new else set()
        self._cold |= new - hot
        return hot


class _Picker:
    """The lines of one file that are kept: the first and the last relevant ones, and its end."""

    def __init__(self, kept: int) -> None:
        self._end = min(END_LINES, kept)
        self._scan = LineScan()
        self._scanned = 0
        self._kept = FirstAndLast(kept)
        self._last: list[Numbered] = []
        self._lines = 0
        self._after = 0
        """How many lines of the next block are to be kept."""

    def feed(self, block: bytes) -> None:
        """Search the next whole lines."""
        self._scanned += len(block)
        if self._scanned > PIECE:
            self._scan, self._scanned = LineScan(), len(block)
        first, hot = self._lines, self._scan.hot(block)
        if hot or self._after:
            self._look(first, block.split(b"\n"), hot)
        self._lines = first + block.count(b"\n") + 1
        ending = block.rsplit(b"\n", self._end)[-self._end :]
        recent = list(enumerate(map(visible, ending), self._lines - len(ending)))
        self._last = [*self._last, *recent][-self._end :]

    def lines(self) -> list[FileLine]:
        """Return the lines that are kept."""
        chosen = {**dict(self._kept.lines()), **dict(self._last)}
        return [FileLine(number + 1, _text(chosen[number])) for number in sorted(chosen)]

    def _look(self, first: int, lines: list[bytes], hot: list[int]) -> None:
        self._keep(first, lines, 0, self._after)
        self._after = max(0, self._after - len(lines))
        for index in hot:
            if index < BEFORE:
                for line in self._last[index - BEFORE :]:
                    self._kept.add(line)
            self._keep(first, lines, index - BEFORE, index + AFTER + 1)
            self._after = max(0, index + AFTER + 1 - len(lines))

    def _keep(self, first: int, lines: list[bytes], begin: int, end: int) -> None:
        for index in range(max(0, begin), min(end, len(lines))):
            self._kept.add((first + index, visible(lines[index])))


def visible(raw: bytes) -> bytes:
    """Return a line as a terminal finally shows it, with the last state of a progress bar, of limited length."""
    return last_state(raw)[:LINE_MAX]


def _line_start(file: io.BufferedReader, offset: int) -> int:
    """Return the position of the first line that starts at this offset or later."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    while chunk := file.read(LINE_MAX):
        newline = chunk.find(b"\n")
        if newline >= 0:
            return file.tell() - len(chunk) + newline + 1
    return file.tell()


def _blocks(file: io.BufferedReader, start: int, stop: int) -> Iterator[bytes]:
    """Yield blocks of whole lines; a line of any length takes no more memory than a block."""
    rest, skipping = b"", False
    file.seek(start)
    while block := file.read(max(0, min(BLOCK, stop - file.tell()))):
        if skipping:
            _, newline, block = block.partition(b"\n")
            if not newline:
                continue
            block, skipping = rest + b"\n" + block, False
        else:
            block = rest + block
        whole, newline, rest = block.rpartition(b"\n")
        if newline:
            yield whole
        if len(rest) > LINE_MAX:
            # Only the last state of a long progress bar is kept.
            state = rest.rpartition(b"\r")[2]
            rest, skipping = state[:LINE_MAX], len(state) > LINE_MAX
    if rest:
        yield rest

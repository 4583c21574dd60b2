"""Which lines of a block of text may matter, found without a look at each line.

In: blocks of whole lines. Out: indexes of the lines that hold a word of trouble.

Where lines are not alike, GNU grep looks for the words, if it is there: its automaton reads a text three times as fast
as Python's expressions do.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable

# A failure says one of these, or another line of it does: what the diagnosis looks for stands near. A line far from any
# is only counted.
HOT = (
    *(b"Traceback", b"rror", b"xception", b"nterrupt", b"atchdog", b"imed out", b"imeout", b"exitcode", b"return code"),
    *(b"signal", b"ailed", b"ailure", b"kill", b"Kill", b"oom", b"bort", b" fault", b"orrupt", b"free", b"malloc"),
    *(b"rrno", b"No ", b"denied", b"refused", b"closed", b"Xid", b" nan", b"oss is", b"throwing"),
    *(b"ERROR", b"CCL", b"IBV_WC", b"SIG", b"DUE TO", b"CANCELLED", b"STATUS", b"ECC", b"OVERFLOW"),
)
# What has come so often is routine: training prints it at each step.
ROUTINE = 1000
_KNOWN_MAX = 100_000
# Where a larger share of a block's lines is of new kinds, to look each up costs more than it saves.
_NEW_SHARE = 0.5

# A shorter text is looked through before grep has started; one block takes it milliseconds.
_GREP_BYTES = 1 << 17
_GREP_S = 60

# Lines of a log differ in numbers, marks and bars: by their letters alone most are alike.
_BLANKS = b":='\"\t"
_SIGNS = bytes.maketrans(_BLANKS, b" " * len(_BLANKS))
_LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz \n" + _BLANKS)
_DROPPED = bytes(code for code in range(256) if code not in _LETTERS)
# From the rarest on; b is frequent for the numbers in base 16. Capitals are rarer than all.
_RARE = b"zqjxkvpygfwmu"
_FREQUENT = b"bcldrhsnioate "
_FROM_RARE = _RARE + _FREQUENT
# Where the next is in a text, from an index on; negative: none.
_Finder = Callable[[bytes, int], int]


def letters(text: bytes) -> bytes:
    """Return the letters of a text: the kind of a line."""
    return text.translate(_SIGNS, _DROPPED)


def _finders(words: Iterable[bytes]) -> list[_Finder]:
    """Return what finds any of these words in a text of letters, when asked one by one.

    One expression is for all words that have a rare letter: it begins there, and so stops at few places of a text. To
    stop at each of a frequent letter would take longer than to find the word by itself.
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
    """Return the lines of a text of letters in which a word of trouble stands."""
    by_grep = _by_grep(text) if len(text) >= _GREP_BYTES else None
    return _by_python(text) if by_grep is None else by_grep


@functools.cache
def _gnu_grep() -> str | None:
    """Return where GNU grep is; others may be slower than Python."""
    path = shutil.which("grep")
    try:
        told = subprocess.run([path, "--version"], capture_output=True, timeout=_GREP_S, check=True) if path else None
    except (OSError, subprocess.SubprocessError):
        return None
    return path if told and b"GNU grep" in told.stdout else None


def _by_grep(text: bytes) -> set[bytes] | None:
    """Return the same by grep; None: it is not there, or has failed."""
    grep = _gnu_grep()
    if grep is None:
        return None
    # Plain words: none of these letters has a meaning in an expression.
    command = [grep, "-a", "-E", "-e", b"|".join(map(letters, HOT)).decode()]
    try:
        done = subprocess.run(command, input=text, capture_output=True, timeout=_GREP_S, env={"LC_ALL": "C"})
    except (OSError, subprocess.SubprocessError):
        return None
    # 1: there is none.
    return set(done.stdout.split(b"\n")) - {b""} if done.returncode in (0, 1) else None


def _by_python(text: bytes) -> set[bytes]:
    hot: set[bytes] = set()
    for find in _FINDERS:
        end = 0
        # A bar without a line's end may have a thousand in one line: once is enough.
        while (place := find(text, end)) >= 0:
            end = text.find(b"\n", place)
            end = len(text) if end < 0 else end
            hot.add(text[text.rfind(b"\n", 0, place) + 1 : end])
    return hot


class Scan:
    """Finds what may matter, block by block; remembers the kinds of lines while most are alike."""

    def __init__(self) -> None:
        self._alike = True
        self._cold: set[bytes] = set()
        self._hot: Counter[bytes] = Counter()

    def hot(self, block: bytes) -> list[int]:
        """Return the indexes of the lines that may matter, up to a number of each kind."""
        if len(self._cold) + len(self._hot) > _KNOWN_MAX:
            self._cold.clear()
            self._hot.clear()
        text = letters(block)
        hot = self._hot_of_new(text) if self._alike else _hot_in(text) - self._cold
        if not hot:
            return []
        kinds = text.split(b"\n")
        found = [index for index, kind in enumerate(kinds) if kind in hot]
        self._hot.update(kinds[index] for index in found)
        self._cold.update(kind for kind in hot if self._hot[kind] >= ROUTINE)
        return found

    def _hot_of_new(self, text: bytes) -> set[bytes]:
        """Return the kinds of lines with a word of trouble, without a second look at those that are known."""
        kinds = text.split(b"\n")
        new = set(kinds) - self._cold
        self._alike = len(new) <= _NEW_SHARE * len(kinds)
        hot = _hot_in(b"\n".join(new)) if new else set()
        self._cold |= new - hot
        return hot

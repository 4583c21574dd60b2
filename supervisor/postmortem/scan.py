"""Which lines of a block of text may matter, found without a look at each line.

In: blocks of whole lines. Out: indexes of the lines that hold a word of trouble.
"""

from __future__ import annotations

from collections import Counter

# A failure says one of these, or another line of it does: what the diagnosis looks for stands near. A line far from any
# is only counted.
HOT = (
    *(b"Traceback", b"rror", b"xception", b"nterrupt", b"atchdog", b"imed out", b"imeout", b"exitcode", b"return code"),
    *(b"signal", b"ailed", b"ailure", b"kill", b"Kill", b"oom", b"bort", b" fault", b"orrupt", b"free", b"malloc"),
    *(b"rrno", b"No ", b"denied", b"refused", b"closed", b"Xid", b" nan", b"oss is", b"throwing"),
)
HOT_CAPITALS = (b"ERROR", b"CCL", b"IBV_WC", b"SIG", b"DUE TO", b"CANCELLED", b"STATUS", b"ECC", b"OVERFLOW")
# What has come so often is routine: training prints it at each step.
ROUTINE = 1000
_KNOWN_MAX = 100_000

# Lines of a log differ in numbers, marks and bars: by their letters alone most are alike.
_BLANKS = b":='\"\t"
_SIGNS = bytes.maketrans(_BLANKS, b" " * len(_BLANKS))
_LETTERS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz \n" + _BLANKS)
_DROPPED = bytes(code for code in range(256) if code not in _LETTERS)


def letters(text: bytes) -> bytes:
    """Return the letters of a text: the kind of a line."""
    return text.translate(_SIGNS, _DROPPED)


_HOT = tuple(letters(word) for word in HOT)
_HOT_CAPITALS = tuple(letters(word) for word in HOT_CAPITALS)
_SMALL = b"abcdefghijklmnopqrstuvwxyz"


def _words_in(kinds: bytes) -> list[bytes]:
    """Return the words of trouble in a text of letters."""
    # Few letters are capital: words of them alone are looked for in what is left without the others.
    capitals = kinds.translate(None, _SMALL)
    return [*(word for word in _HOT if word in kinds), *(word for word in _HOT_CAPITALS if word in capitals)]


class Scan:
    """Finds what may matter, block by block; remembers the kinds of lines."""

    def __init__(self) -> None:
        self._cold: set[bytes] = set()
        self._hot: Counter[bytes] = Counter()

    def hot(self, block: bytes) -> list[int]:
        """Return the indexes of the lines that may matter, up to a number of each kind."""
        kinds = letters(block).split(b"\n")
        fresh = set(kinds) - self._cold
        if not fresh:
            return []
        words = _words_in(b"\n".join(fresh))
        hot = {kind for kind in fresh if any(word in kind for word in words)} if words else set()
        found = [index for index, kind in enumerate(kinds) if kind in hot] if hot else []
        self._learn(fresh - hot, [kinds[index] for index in found])
        return found

    def _learn(self, cold: set[bytes], hot: list[bytes]) -> None:
        if len(self._cold) + len(self._hot) > _KNOWN_MAX:
            self._cold.clear()
            self._hot.clear()
        self._cold |= cold
        self._hot.update(hot)
        self._cold.update(kind for kind in set(hot) if self._hot[kind] >= ROUTINE)

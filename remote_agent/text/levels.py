"""Levels of lines by cheap byte patterns: D, I, W, E; a line without a level is I.

In: raw lines, blocks of lines. Out: the level of a line, the level bits of a block.
"""

from __future__ import annotations

import re

DEBUG, INFO, WARN, ERROR = 1, 2, 4, 8
# This bit marks blocks that may hold lines of NCCL. Each such line contains the mark.
NCCL = 16
NCCL_MARK = b"CCL "
LETTERS = {DEBUG: "D", INFO: "I", WARN: "W", ERROR: "E"}

# Loggers print these names; the first one in a line counts.
_NAMED = re.compile(rb"\b(?:(DEBUG|TRACE)|(INFO|NOTICE)|(WARN(?:ING)?)|(ERROR|CRITICAL|FATAL))\b")
# The format of glog, which torch uses: a letter, then month and day or the source file.
_GLOG = re.compile(rb"(?:^|[\[:])([DIWEF])(?:\d{4}\s|\s\w+\.cpp\b)")
_GLOG_MARKS = (b".cpp:", b"torch/")
_GLOG_LEVELS = {b"D": DEBUG, b"I": INFO, b"W": WARN, b"E": ERROR, b"F": ERROR}
_ERROR_TEXT = re.compile(rb"Traceback \(most recent call last\)|\b\w*(?:Error|Exception)\b|\berror: ")
_WARN_TEXT = re.compile(rb"\b\w*Warning\b|\bwarning: ")
# Levels are searched only in this many bytes at the front of a line.
_FRONT = 2048

# Texts that lines of a level, and of NCCL, contain: `search` and `merged` skip blocks without them.
# A letter is found ten times as fast as a word: words are searched only where their letter occurs.
_MARKS = (
    (b"E", (b"ERROR", b"Error", b"Exception"), ERROR),
    (b"T", (b"CRITICAL", b"FATAL", b"Traceback"), ERROR),
    (b":", (b"error: ",), ERROR),
    (b"W", (b"WARN", b"Warning"), WARN),
    (b":", (b"warning: ",), WARN),
    (b"L", (NCCL_MARK,), NCCL),
)

# A terminal does not show these: CSI … final byte, OSC … BEL or ST, codes of two bytes, a lone ESC at a line's end.
ESCAPE = r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\|$)|[PX^_][^\x1b\r\n]*(?:\x1b\\|$)|[^\r\n]|$)"
ESCAPES = re.compile(ESCAPE.encode(), re.MULTILINE)

# Pieces must overlap by this much: the length of the longest text above, less one.
OVERLAP = 8

_NAMES = {
    "d": DEBUG, "debug": DEBUG, "i": INFO, "info": INFO, "w": WARN, "warn": WARN, "warning": WARN,
    "e": ERROR, "error": ERROR, "critical": ERROR, "fatal": ERROR,
}  # fmt: skip


def level_of(line: bytes) -> int:
    """Return the level bit of one line."""
    front = line[:_FRONT]
    if b"\x1b" in front:
        # Escape codes are replaced, not removed: the bits of a block come from words as they are in the file.
        front = ESCAPES.sub(b"\0", front).lstrip(b"\0")
    # This is asked of every line: each expression runs only where some bytes of its words occur.
    if b".cpp:" in front or b"torch/" in front:
        glog = _GLOG.search(front)
        if glog is not None:
            return _GLOG_LEVELS[glog.group(1)]
    if b"E" in front or b"A" in front or b"INFO" in front:
        named = _NAMED.search(front)
        if named is not None:
            return (DEBUG, INFO, WARN, ERROR)[(named.lastindex or 1) - 1]
    is_error = b"rror" in front or b"Exception" in front or b"Traceback" in front
    if is_error and _ERROR_TEXT.search(front):
        return ERROR
    return WARN if b"arning" in front and _WARN_TEXT.search(front) else INFO


def block_bits(block: bytes, known: int = 0) -> int:
    """Return `known` and the bits of all levels that lines of this block may have, and NCCL; I always, D never."""
    bits = known | INFO
    for letter, words, level in _MARKS:
        if not bits & level and letter in block and any(word in block for word in words):
            bits |= level
    if bits & (ERROR | WARN) != ERROR | WARN and _may_hold_glog(block):
        bits |= ERROR | WARN
    return bits


def _may_hold_glog(block: bytes) -> bool:
    # The bits are written out because this is asked of every block.
    letters = b"W" in block or b"E" in block or b"F" in block
    return letters and any(mark[-1:] in block and mark in block for mark in _GLOG_MARKS)


def minimum_level(name: str | None) -> int:
    """Return the bit of the lowest level wanted (warn, error, W, …); 0 for None; raises ValueError for another name."""
    if name is None or name == "":
        return 0
    try:
        return _NAMES[name.lower()]
    except KeyError:
        raise ValueError(f"no such level: {name}; use debug, info, warn or error") from None

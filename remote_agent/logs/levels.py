"""Levels of lines by cheap byte patterns: D, I, W, E; a line that names none is I.

In: raw lines, blocks of lines. Out: the level of a line, the level bits that a block may hold.
"""

from __future__ import annotations

import re

DEBUG, INFO, WARN, ERROR = 1, 2, 4, 8
# Of a block: it may hold lines of NCCL. Each of them holds the mark.
NCCL = 16
NCCL_MARK = b"CCL "
LETTERS = {DEBUG: "D", INFO: "I", WARN: "W", ERROR: "E"}

# What loggers print, the first one wins.
_NAMED = re.compile(rb"\b(?:(DEBUG|TRACE)|(INFO|NOTICE)|(WARN(?:ING)?)|(ERROR|CRITICAL|FATAL))\b")
# The form of glog, which torch uses for lines of its own: a letter, then month and day or the source file.
_GLOG = re.compile(rb"(?:^|[\[:])([DIWEF])(?:\d{4}\s|\s\w+\.cpp\b)")
_GLOG_MARKS = (b".cpp:", b"torch/")
_GLOG_LEVELS = {b"D": DEBUG, b"I": INFO, b"W": WARN, b"E": ERROR, b"F": ERROR}
_ERROR_TEXT = re.compile(rb"Traceback \(most recent call last\)|\b\w*(?:Error|Exception)\b|\berror: ")
_WARN_TEXT = re.compile(rb"\b\w*Warning\b|\bwarning: ")
# Levels are looked for at the front only: nobody names one behind this many bytes.
_FRONT = 2048

# What a line of a level holds, and of NCCL: a block without it need not be looked at by `search` and `merged`.
# One letter is found ten times as fast as a word: only where it is there are the words that hold it looked for.
_MARKS = (
    (b"E", (b"ERROR", b"Error", b"Exception"), ERROR),
    (b"T", (b"CRITICAL", b"FATAL", b"Traceback"), ERROR),
    (b":", (b"error: ",), ERROR),
    (b"W", (b"WARN", b"Warning"), WARN),
    (b":", (b"warning: ",), WARN),
    (b"L", (NCCL_MARK,), NCCL),
)

# What a terminal does not show: CSI … final byte, OSC … BEL or ST, codes of two bytes, a lone ESC at a line's end.
ESCAPE = r"\x1b(?:\[([0-?]*)[ -/]*([@-~])|\][^\x07\x1b\r\n]*(?:\x07|\x1b\\|$)|[PX^_][^\x1b\r\n]*(?:\x1b\\|$)|[^\r\n]|$)"
ESCAPES = re.compile(ESCAPE.encode(), re.MULTILINE)

# Longest of the texts above, less one: what a reader in pieces must look at again.
OVERLAP = 8

_NAMES = {
    "d": DEBUG, "debug": DEBUG, "i": INFO, "info": INFO, "w": WARN, "warn": WARN, "warning": WARN,
    "e": ERROR, "error": ERROR, "critical": ERROR, "fatal": ERROR,
}  # fmt: skip


def level_of(line: bytes) -> int:
    """Return the level bit of one line."""
    front = line[:_FRONT]
    if b"\x1b" in front:
        # Not joined: the block's bits are told from words as they stand in the file.
        front = ESCAPES.sub(b"\0", front).lstrip(b"\0")
    if any(mark in front for mark in _GLOG_MARKS):
        glog = _GLOG.search(front)
        if glog is not None:
            return _GLOG_LEVELS[glog.group(1)]
    named = _NAMED.search(front)
    if named is not None:
        return (DEBUG, INFO, WARN, ERROR)[(named.lastindex or 1) - 1]
    if _ERROR_TEXT.search(front):
        return ERROR
    return WARN if _WARN_TEXT.search(front) else INFO


def block_bits(block: bytes, known: int = 0) -> int:
    """Return `known` and the bits of all levels that lines of this block may have, and NCCL; I always, D never."""
    bits = known | INFO
    for letter, words, told in _MARKS:
        if not bits & told and letter in block and any(word in block for word in words):
            bits |= told
    if bits & (ERROR | WARN) != ERROR | WARN and _may_hold_glog(block):
        bits |= ERROR | WARN
    return bits


def _may_hold_glog(block: bytes) -> bool:
    # Written out: this is asked of every block.
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

"""Levels of lines by cheap byte patterns: D, I, W, E; a line that names none is I.

In: raw lines, blocks of lines. Out: the level of a line, the level bits that a block may hold.
"""

from __future__ import annotations

import re

from remote_agent.logs.rows import NCCL_MARK

DEBUG, INFO, WARN, ERROR = 1, 2, 4, 8
# Of a block: it may hold lines of NCCL.
NCCL = 16
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

# A block without any of these, in any case, holds no line of the level: what `search` and `merged` may skip.
# Few and long on purpose: each costs a pass over all that is written.
_ERROR_MARKS = (b"traceback", b"exception", b"critical", b"fatal", b"error")
_WARN_MARKS = (b"warn",)

# Longest of the texts above, less one: what a reader in pieces must look at again.
OVERLAP = 8

_NAMES = {
    "d": DEBUG, "debug": DEBUG, "i": INFO, "info": INFO, "w": WARN, "warn": WARN, "warning": WARN,
    "e": ERROR, "error": ERROR, "critical": ERROR, "fatal": ERROR,
}  # fmt: skip


def level_of(line: bytes) -> int:
    """Return the level bit of one line."""
    front = line[:_FRONT]
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
    if not bits & NCCL and NCCL_MARK in block:
        bits |= NCCL
    if bits & (ERROR | WARN) == ERROR | WARN:
        return bits
    if any(mark in block for mark in _GLOG_MARKS):
        return bits | ERROR | WARN
    lower = block.lower()
    if not bits & ERROR and any(mark in lower for mark in _ERROR_MARKS):
        bits |= ERROR
    if not bits & WARN and any(mark in lower for mark in _WARN_MARKS):
        bits |= WARN
    return bits


def minimum_level(name: str | None) -> int:
    """Return the bit of the lowest level wanted (warn, error, W, …); 0 for None; raises ValueError for another name."""
    if name is None or name == "":
        return 0
    try:
        return _NAMES[name.lower()]
    except KeyError:
        raise ValueError(f"no such level: {name}; use debug, info, warn or error") from None

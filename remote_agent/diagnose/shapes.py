"""Texts without their incidental parts.

In: messages. Out: clipped text, shapes that are equal for the same failure, signatures.
"""

from __future__ import annotations

import re

_CLIP = 240
_HEX = re.compile(r"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{12,}\b")
# Not from within a word: a long one without a slash would be looked through from each of its letters.
_PATH = re.compile(r"(?<![\w.~-])(?:[\w.~-]*/)+[\w.~@+-]*")
_DIGITS = re.compile(r"\d+(?:[.,:]\d+)*")
_SPACE = re.compile(r"\s+")


def lines_of(text: str) -> list[str]:
    """Return the lines, each as a terminal would show it in the end: the last state of a progress bar."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def clip(text: str) -> str:
    """Return one line of at most 240 characters."""
    text = _SPACE.sub(" ", text).strip()
    return text if len(text) <= _CLIP else text[: _CLIP - 1] + "…"


def bare(text: str) -> str:
    """Return the text with paths, addresses and numbers replaced."""
    text = _HEX.sub("X", text)
    text = _PATH.sub("P", text)
    return _SPACE.sub(" ", _DIGITS.sub("N", text)).strip()


def shape(text: str) -> str:
    """Return the same in one line of at most 240 characters."""
    return clip(bare(text))


def signature(category: str, kind: str, place: str, message: str) -> str:
    """Return what is the same for the same failure on other ranks, nodes and generations."""
    return "|".join((category, kind, place, shape(message)))

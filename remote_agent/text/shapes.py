"""Texts without their incidental parts.

In: messages. Out: clipped text, shapes and fingerprints that are equal for the same failure.
"""

from __future__ import annotations

import re

# Thousands of ranks that fail alike print few different texts: what was read in these last ones is kept.
KEPT_TEXTS = 16
_CLIP = 240
_HEX = re.compile(r"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{12,}\b")
# A match may not begin inside a word: a long word without a slash would be scanned from each of its letters.
_PATH = re.compile(r"(?<![\w.~-])(?:[\w.~-]*/)+[\w.~@+-]*")
_DIGITS = re.compile(r"\d+(?:[.,:]\d+)*")
_SPACE = re.compile(r"\s+")


def lines_of(text: str) -> list[str]:
    """Return the lines, each as a terminal finally shows it: the last state of a progress bar."""
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
    """Return `bare` text as one line of at most 240 characters."""
    return clip(bare(text))


def fingerprint(category: str, kind: str, place: str, message: str) -> str:
    """Return a key that is equal for the same failure on other ranks, nodes and generations."""
    return "|".join((category, kind, place, shape(message)))

r"""Untrusted text made safe for a terminal: control characters and invisible marks are shown as escapes.

In: any text. Out: the same text with an escape, such as `\x1b` or `\u202e`, in place of each character that a terminal
acts on, that changes the writing direction, or that nobody can see. Newlines and tabs stay.
"""

from __future__ import annotations

import json
import re

# These are C0 and C1, marks of direction and other invisible marks, and lone surrogates. The joiners U+200C and U+200D
# are kept, because emoji and some scripts need them.
_UNSAFE = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    r"\ufff9-\ufffb\U000e0000-\U000e007f"
)
_CONTROL = re.compile(f"[{_UNSAFE}]")
# SGR sets colours and attributes, so it changes only the look of the text behind it.
_COLOUR_OR_CONTROL = re.compile(rf"(\x1b\[[0-9;:]{{0,64}}m)|[{_UNSAFE}]")


def escape_controls(text: str) -> str:
    """Return text with escapes for its control characters and invisible marks; newlines and tabs stay."""
    return text if text.isprintable() else _CONTROL.sub(_escape, text)


def escape_all_but_colours(text: str) -> str:
    """Return text with escapes for its control characters and invisible marks, except in codes for colours."""
    return text if text.isprintable() else _COLOUR_OR_CONTROL.sub(lambda code: code[1] or _escape(code), text)


def json_text(document: object) -> str:
    """Return a document as JSON on one line, with JSON's own escapes for control characters and invisible marks."""
    text = json.dumps(document, ensure_ascii=False)
    return text if text.isprintable() else _CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], text)


def _escape(control: re.Match[str]) -> str:
    return control[0].encode("unicode_escape").decode("ascii")

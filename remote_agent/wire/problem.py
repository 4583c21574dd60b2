"""What a request is refused with.

In: a kind for programs, a message and a hint for people. Out: `Problem`, the error of an answer on every wire.
"""

from __future__ import annotations


class Problem(Exception):
    """A handler's refusal: kind for programs, message and hint for people."""

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.hint = hint

"""Text for the clipboard of the terminal that the user sits at, also over SSH and inside tmux or screen.

In: text. Out: the sequence that hands it to the terminal, where it is not too long; a file that always has it.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from supervisor.paths import state_dir

# What the strictest of the common terminals take, in the form in which it is sent.
LONGEST: Final = 74_994
_ESC: Final = "\x1b"


def sequence(text: str, env: Mapping[str, str] = os.environ) -> str | None:
    """The OSC 52 sequence for a text, wrapped for tmux or screen; None where it is too long."""
    data = base64.b64encode(text.encode()).decode()
    if len(data) > LONGEST:
        return None
    osc = f"{_ESC}]52;c;{data}\a"
    if env.get("TMUX"):
        return f"{_ESC}Ptmux;{osc.replace(_ESC, _ESC * 2)}{_ESC}\\"
    if env.get("TERM", "").startswith("screen"):
        # screen takes at most 768 bytes a string.
        parts = [osc[at : at + 256] for at in range(0, len(osc), 256)]
        return "".join(f"{_ESC}P{part}{_ESC}\\" for part in parts)
    return osc


def save(text: str) -> Path:
    """Write a text to where the user finds it if the terminal does not take it; raises OSError."""
    path = state_dir() / "copied.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text + "\n")
    return path

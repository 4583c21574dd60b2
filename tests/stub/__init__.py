"""Packages that stand in for real ones where those are not the point: this directory on PYTHONPATH."""

from __future__ import annotations

import os
from pathlib import Path

STUB = Path(__file__).parent


def on_path() -> str:
    """A PYTHONPATH that finds them before all that this process' own names."""
    path = os.environ.get("PYTHONPATH", "")
    return f"{STUB}{os.pathsep if path else ''}{path}"

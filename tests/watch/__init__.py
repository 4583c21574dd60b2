"""What makes each Python that a test starts watch its event loops: see held.py."""

from __future__ import annotations

import os
from pathlib import Path

WATCH = Path(__file__).parent
HELD = "SUPERVISOR_HELD"


def variables(python_path: str = "") -> dict[str, str]:
    """The variables of a process that is watched; `python_path`: what it has in PYTHONPATH before."""
    paths = dict.fromkeys(filter(None, (*python_path.split(os.pathsep), str(WATCH))))
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore::held.Held"}

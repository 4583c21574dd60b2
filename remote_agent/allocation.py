"""The Slurm step that a process was started in.

In: the environment that slurmstepd has set. Out: what SIGTERM means here.
"""

from __future__ import annotations

import os


def ending() -> str:
    """Say what SIGTERM means: scancel, a time limit, a job of higher priority; empty outside of a step."""
    return f"Slurm ends allocation {os.environ.get('SLURM_JOB_ID')} (SIGTERM)" if "SLURM_STEP_ID" in os.environ else ""

"""Packages that stand in for real ones where those are not the point: this directory on PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

STUB = Path(__file__).parent

"""The operator's side: launch a torch job over SSH, watch it, restart it, scale it.

In: nothing.
Out: `__version__`.
"""

from __future__ import annotations

__version__ = "0.1.0"

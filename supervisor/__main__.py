"""`supervisor` and `python -m supervisor`.

In: argv. Out: an exit status.
"""

from __future__ import annotations

import sys

from supervisor.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())

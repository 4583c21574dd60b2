"""`supervisor` and `python -m supervisor`.

In: argv. Out: an exit status.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; Ctrl-C while it is still being imported ends it like any other, without a traceback."""
    try:
        from supervisor.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())

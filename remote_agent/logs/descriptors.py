"""Open log files, a bounded number of them.

In: paths. Out: descriptors for pread.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from pathlib import Path

# Two generations of 32 ranks with three streams each; far below the usual limit of 1,024 open files.
LIMIT = 192


class Descriptors:
    """Read-only descriptors by path; the one unused for longest is closed when there are too many."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def get(self, path: Path) -> int:
        """Return a descriptor that is valid until the next call; raises OSError."""
        fd = self._open.get(path)
        if fd is None:
            # O_NONBLOCK: a fifo put in the place of a log must not stop the agent.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._open[path] = fd
            if len(self._open) > LIMIT:
                _, oldest = self._open.popitem(last=False)
                os.close(oldest)
        self._open.move_to_end(path)
        return fd

    def drop(self, path: Path) -> None:
        """Close the descriptor of a path that now names another file."""
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close all."""
        while self._open:
            _, fd = self._open.popitem()
            with contextlib.suppress(OSError):
                os.close(fd)

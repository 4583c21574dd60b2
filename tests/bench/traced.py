"""The supervisor's command line, with a note of each step that each host comes to.

In: argv: the file for the notes, then the words of the command line. Out: lines `T_NS HOST STEP TEXT`; its exit code.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from supervisor.cli import main
from supervisor.link.host_link import HostLink


def trace(path: Path) -> None:
    """From now on, write down every step as a link reports it."""
    notes = path.open("a", buffering=1)
    report = HostLink.progress

    def progress(self: HostLink, step: str, text: str) -> None:
        notes.write(f"{time.time_ns()} {self.host.name} {step} {text!r}\n")
        report(self, step, text)

    HostLink.progress = progress  # type: ignore[method-assign]


if __name__ == "__main__":
    trace(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))

"""`supervisor` and `python -m supervisor`.

In: argv. Out: an exit code; SIGHUP to this process when the terminal of its output is gone.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def main() -> int:
    """Run the command line; Ctrl-C while it is still being imported ends it like any other, without a traceback."""
    try:
        _hang_up_with_terminal()
        from supervisor.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


def _hang_up_with_terminal() -> None:
    """Have a terminal that is gone end every command as SIGHUP does.

    The kernel sends SIGHUP to the leader of the session only, and not every leader passes it on: make waits for us.
    """
    if os.isatty(1):
        threading.Thread(target=_hang_up_when_gone, args=(1,), name="terminal", daemon=True).start()


def _hang_up_when_gone(terminal: int) -> None:
    watched = select.poll()
    # No events are requested, as others read and write the terminal: a hang-up and an error are always reported.
    watched.register(terminal, 0)
    if any(events & (select.POLLHUP | select.POLLERR) for _, events in watched.poll()):
        os.kill(os.getpid(), signal.SIGHUP)


if __name__ == "__main__":
    sys.exit(main())

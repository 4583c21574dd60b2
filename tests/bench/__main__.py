"""Timings against clush and torchrun on hosts of this machine, in one run: `python -m tests.bench [NAME …]`.

In: argv. Out: tables on stdout; with --json PATH all numbers; exit code 0, or 2 where no hosts can be made.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench import (
    diagnose,
    failures,
    first_step,
    flood,
    launch,
    logs,
    many,
    odd,
    report,
    restart,
    sampling,
    scale,
    screen,
    snapshots,
    standby,
)
from tests.bench.report import Report
from tests.cluster import ClusterError, cluster_obstacle
from tests.cluster.leftovers import MARK, describe, end, marked
from tests.scratch import scratch

BENCHMARKS: dict[str, Callable[[], Report]] = {
    "launch": launch.run,
    "first_step": first_step.run,
    "restart": restart.run,
    "standby": standby.run,
    "failures": failures.run,
    "screen": screen.run,
    "diagnose": diagnose.run,
    "flood": flood.run,
    "browse": logs.browse,
    "grep": logs.grep,
    "odd": odd.run,
    "snapshots": snapshots.run,
    "many": many.run,
    "sampling": sampling.run,
    "scale": scale.run,
}
# These need no cluster of hosts.
ALONE = frozenset({"sampling", "scale"})


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks that are named, or all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to a file")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    names = options.names or list(BENCHMARKS)
    obstacle = "" if ALONE.issuperset(names) else cluster_obstacle()
    if obstacle:
        print(f"no hosts to measure on: {obstacle}", file=sys.stderr)
        return 2
    # Everything started here inherits the mark, but for what comes in through SSH: that ends with its host.
    os.environ[MARK] = secrets.token_hex(8)
    with scratch():
        try:
            return _run([BENCHMARKS[name] for name in names], options.json)
        finally:
            left = marked(os.environ[MARK])
            for pid in left:
                print(f"left behind (ended now): {describe(pid)}", file=sys.stderr)
            end(left)


def _run(benchmarks: list[Callable[[], Report]], path: Path | None) -> int:
    before = report.machine()
    print(f"{report.machine_line(before)}\n", flush=True)
    reports = []
    status = 0
    for benchmark in benchmarks:
        begun = time.monotonic()
        try:
            found = benchmark()
        except (ClusterError, AssertionError, OSError, subprocess.TimeoutExpired) as error:
            print(f"{benchmark.__module__} failed: {error}", file=sys.stderr)
            status = 1
            continue
        reports.append(found)
        print("\n\n".join(table.text() for table in found.tables))
        print(f"\n({found.name}: {time.monotonic() - begun:.0f} s, load now {report.machine()['load']})\n", flush=True)
    if path is not None:
        report.write_json(path, reports, before)
    return status


if __name__ == "__main__":
    sys.exit(main())

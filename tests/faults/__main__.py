"""Run the fault matrix: `python -m tests.faults`, as root.

    python -m tests.faults                                 # every fault with the seeds 1 to 20, rows beside each other
    python -m tests.faults "host gone" --seeds 7 -v        # one case, on hosts of its own
    python -m tests.faults "host gone" "rank killed" --seeds 7 -v  # both on one job, if that seed gives both such hosts
    python -m tests.faults --list

In: names of faults, seeds; SUPERVISOR_FAULTS has more arguments, for `make faults`. Out: a line for each case that did
not go well, with the command that repeats it; a table; with --json all figures. Exit status 0 if every invariant held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests import skew
from tests.bench.report import Table, machine, machine_line
from tests.cluster import cluster_obstacle
from tests.cluster.leftovers import MARK, describe, end, marked
from tests.cluster.podman import podman_obstacle
from tests.faults.case import Fault
from tests.faults.matrix import BY_NAME, FAULTS
from tests.faults.row import rows, run
from tests.scratch import scratch

SEEDS = "1-20"
_POLL_S = 0.1
# A row, and each case of it, whose program hangs for as long as it may, at every step.
_ROW_S = 300.0
_CASE_S = 180.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit code."""
    words = sys.argv[1:] if argv is None else [*argv]
    options = _parser().parse_args([*words, *shlex.split(os.environ.get("SUPERVISOR_FAULTS", ""))])
    unknown = [name for name in options.names if name not in BY_NAME]
    if unknown:
        print(f"no fault {unknown[0]!r}; there are: {', '.join(BY_NAME)}", file=sys.stderr)
        return 2
    faults = [BY_NAME[name] for name in options.names] or [*FAULTS]
    if options.list:
        print(_listing(faults).text())
        return 0
    obstacle = (podman_obstacle() or "") if options.containers else ""
    obstacle = obstacle or cluster_obstacle() or (skew.obstacle() if any(fault.clocks for fault in faults) else "")
    if obstacle:
        print(f"no faults here: {obstacle}", file=sys.stderr)
        return 2
    # Write .pyc files: each command is a process.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return _one(faults, options) if options.one else _many(faults, options)
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=(__doc__ or "").partition("\n\n")[0],
    )
    parser.add_argument("names", nargs="*", metavar="FAULT", help="(default: all)")
    parser.add_argument("--seeds", default=SEEDS, metavar="A-B", help=f"one seed, or the first and the last ({SEEDS})")
    parser.add_argument("-j", type=int, default=2 * len(os.sched_getaffinity(0)), metavar="N", help="jobs at once")
    parser.add_argument("--alone", action="store_true", help="run each case on its own hosts")
    parser.add_argument("--containers", action="store_true", help="the ranks run in containers of Podman")
    parser.add_argument("--json", type=Path, metavar="PATH", help="append the figures of each case as a JSON line")
    parser.add_argument("-v", action="store_true", help="print every case, including those that passed")
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the files of failed cases into it")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser


def _listing(faults: Sequence[Fault]) -> Table:
    rows = tuple((fault.name, fault.does, fault.heals) for fault in faults)
    return Table(f"{len(rows)} faults", ("fault", "what it does", "what heals it"), rows, text_columns=(0, 1, 2))


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


# --- one row, in a process of its own


def _one(faults: Sequence[Fault], options: argparse.Namespace) -> int:
    # What goes through SSH ends with its host; all else inherits the mark.
    os.environ[MARK] = secrets.token_hex(8)
    with scratch(), tempfile.TemporaryDirectory() as place:
        try:
            results = run(faults, _seeds(options.seeds)[0], Path(place), options.keep, containers=options.containers)
        finally:
            left = marked(os.environ[MARK])
            for pid in left:
                print(f"left behind (ended now): {describe(pid)}", file=sys.stderr)
            end(left)
    print(json.dumps([result.to_json() for result in results]))
    return 0


# --- many


class _Runs:
    """Rows as child processes, so many at once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._running: dict[subprocess.Popen[str], tuple[tuple[Fault, ...], int, float]] = {}

    def results(self, waiting: deque[tuple[tuple[Fault, ...], int]]) -> Generator[dict[str, Any], None, None]:
        """Run all, and return the outcome of each case as its row ends; what a row does not reach makes another."""
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._options.j:
                    self._begin(*waiting.popleft())
                for faults, seed, results in self._ended():
                    yield from results
                    if len(results) < len(faults):
                        waiting.append((faults[len(results) :], seed))
                time.sleep(_POLL_S)
        finally:
            self._end()

    def _begin(self, faults: tuple[Fault, ...], seed: int) -> None:
        names = (fault.name for fault in faults)
        words = [sys.executable, "-m", "tests.faults", *names, "--seeds", str(seed), "--one"]
        words += ["--containers"] if self._options.containers else []
        if self._options.keep is not None:
            words += ["--keep", str(self._options.keep)]
        environment = {name: value for name, value in os.environ.items() if name != "SUPERVISOR_FAULTS"}
        child = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, env=environment,
        )  # fmt: skip
        self._running[child] = (faults, seed, time.monotonic())

    def _ended(self) -> Iterator[tuple[tuple[Fault, ...], int, list[dict[str, Any]]]]:
        for child, (faults, seed, begun) in list(self._running.items()):
            if child.poll() is None:
                if time.monotonic() - begun > _ROW_S + _CASE_S * len(faults):
                    child.terminate()
                continue
            del self._running[child]
            out, err = child.communicate()
            try:
                yield faults, seed, json.loads(out)
            except ValueError:
                text = f"exit code {child.returncode}: {err.strip()[-1500:]}"
                names = ", ".join(fault.name for fault in faults)
                violation = {"invariant": "case", "text": f"{text} (of the row {names})"}
                yield faults, seed, [{"fault": faults[0].name, "seed": seed, "violations": [violation]}]

    def _end(self) -> None:
        """End what runs; each removes its own hosts."""
        for child in self._running:
            child.terminate()
        for child in self._running:
            child.communicate()


def _many(faults: Sequence[Fault], options: argparse.Namespace) -> int:
    seeds = _seeds(options.seeds)
    jobs = [(row, seed) for seed in seeds for row in rows(faults, seed)]
    if options.alone:
        jobs = [((fault,), seed) for row, seed in jobs for fault in row]
    waiting = deque(jobs)
    count = len(seeds) * len(faults)
    print(f"{count} cases on {len(waiting)} jobs, {options.j} at once; {machine_line(machine())}", flush=True)
    results: list[dict[str, Any]] = []
    try:
        with (
            scratch(),
            contextlib.closing(_Runs(options).results(waiting)) as found,
        ):
            for result in found:
                results.append(result)
                _report(result, len(results), count, options)
    finally:
        print(f"\n{_figures(faults, results).text()}\n{machine_line(machine())}")
    return 1 if any(result["violations"] for result in results) else 0


def _report(result: dict[str, Any], number: int, count: int, options: argparse.Namespace) -> None:
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    head = f"[{number}/{count}] {result['fault']}, seed {result['seed']}"
    if options.v and "hosts" in result:
        print(f"{head}: {result['hosts']} hosts; {'; '.join(result['did'])}; {_facts(result)}", flush=True)
    if result["violations"]:
        again = f"--seeds {result['seed']} -v"
        row = " ".join(f'"{name}"' for name in (*result.get("after", ()), result["fault"]))
        print(f"{head}: {'; '.join(result.get('did', ()))}; load {result.get('load')}", flush=True)
        for one in result["violations"]:
            print(f"    {one['invariant']}: {one['text']}", flush=True)
        print(f'    alone: python -m tests.faults "{result["fault"]}" {again}', flush=True)
        if result.get("after"):
            print(f"    after the same faults: python -m tests.faults {row} {again}", flush=True)


def _facts(result: dict[str, Any]) -> str:
    back = "-" if result["back_s"] is None else f"{result['back_s']:.1f}"
    return (
        f"back {back} s, pause {result['pause_s']:.1f} s, overlap {result['overlap_ms']:.0f} ms, status false"
        f" {result['false_s']:.1f} s, answer {result['answer_s']:.1f} s, load {result['load']};"
        f" {result['seconds']:.0f} s in all"
    )


def _figures(faults: Sequence[Fault], results: Sequence[dict[str, Any]]) -> Table:
    head = ("fault", "cases", "violations", "pause s", "back s", "most", "overlap ms", "status false s", "answer s")
    rows = []
    for fault in faults:
        its = [result for result in results if result["fault"] == fault.name]
        good = [result for result in its if "hosts" in result]
        back = [result["back_s"] for result in good if result["back_s"] is not None]
        pauses = [result["pause_s"] for result in good]
        most = [max((result[key] for result in good), default=0.0) for key in ("overlap_ms", "false_s", "answer_s")]
        rows.append(
            (
                fault.name, str(len(its)), str(sum(len(result["violations"]) for result in its)),
                f"{statistics.median(pauses):.1f}" if pauses else "-",
                f"{statistics.median(back):.1f}" if back else "-", f"{max(back):.1f}" if back else "-",
                f"{most[0]:.0f}", f"{most[1]:.1f}", f"{most[2]:.1f}",
            )
        )  # fmt: skip
    notes = ("pause: the longest time without a step of any rank; back: from healing until all step; medians",)
    wrong = sum(1 for result in results if result["violations"])
    return Table(f"{len(results)} cases, {wrong} of them with violations", head, tuple(rows), notes)


if __name__ == "__main__":
    sys.exit(main())

"""`supervisor hosts` and `supervisor check`: write a hosts.toml; check the hosts without launching.

In: argv. Out: the text of an inventory; a matrix of facts and findings, or one JSON document.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.text.names import count
from supervisor import inventory
from supervisor.cli import colours
from supervisor.cli.entry import say
from supervisor.cli.options import add_json, load_inventory, make_parser, parse, source_words, split_target
from supervisor.cli.output import write_json
from supervisor.errors import Unreachable, UsageError
from supervisor.inventory import sources
from supervisor.inventory.pattern import fold
from supervisor.ssh.reasons import together
from supervisor.standard_streams import out_is_terminal, write_out

if TYPE_CHECKING:
    from supervisor.preflight.oddities import CheckFinding, FactRow
    from supervisor.preflight.probe import GroupOutcome, Preflight

USAGE = " | ".join(f"--from {one.name} {one.metavar}".rstrip() for one in sources.SOURCES) + " >\xa0hosts.toml"


def run(verb: str, argv: Sequence[str]) -> int:
    """Write the inventory; returns the exit code."""
    kinds = {source.name: source for source in sources.SOURCES}
    parser = make_parser(verb, USAGE, target=False)
    parser.add_argument("--from", dest="kind", required=True, choices=list(kinds), help="the source of the hosts")
    parser.add_argument("text", nargs="?", metavar="A,B | FILE", help="the list or the file")
    options = parse(parser, argv)
    source = kinds[options.kind]
    if bool(options.text) is not bool(source.metavar):
        raise UsageError(f"--from {options.kind} {'takes no argument' if options.text else 'needs an argument'}", USAGE)
    document = source.read(options.text or "")
    # An invalid inventory is reported now, not at its first use.
    inventory.build(Path(f"--from {options.kind}"), document, Path.cwd())
    write_out(sources.to_toml(document, f"supervisor hosts {' '.join(argv)}"))
    return 0


# A line begins with a label with single spaces, and a gap before the value.
HEAD = re.compile(r"(?:\S+(?: \S+)*)? *")


# --- check


def run_check(verb: str, argv: Sequence[str]) -> int:
    """Check the hosts; returns 0 without errors, 1 if a job would fail, 3 if a host is unreachable."""
    parser = make_parser(verb, "[HOSTS]")
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="run all-reduce between pairs of nodes to find a slow one (needs torch)",
    )
    add_json(parser)
    colours.add_color(parser)
    options = parse(parser, argv)
    hosts, job = split_target(options.target)
    if job is not None:
        raise UsageError(f"check takes no JOB: {job}", f"supervisor status {job}")
    inventory = load_inventory(hosts, options)
    from supervisor.launch.specs import check_workdir
    from supervisor.preflight.oddities import findings, matrix
    from supervisor.preflight.probe import preflight

    if inventory.path is not None and inventory.job.sync:
        check_workdir(inventory)
    report = (lambda text: None) if options.json else say
    if named := source_words(hosts, options):
        report(f"hosts: {fold([host.name for host in inventory.hosts])} ({named})")
    result = asyncio.run(preflight(inventory, collectives=options.collectives, say=report))
    problems = findings(result)
    fails = any(finding.severity == "error" for finding in problems)
    if options.json:
        write_json(document(result, problems, ok=not fails and not result.unreachable))
    else:
        out = lines(result, matrix(result), problems)
        columns = shutil.get_terminal_size().columns
        pieces = [piece for line in out for piece in wrapped(line, columns)] if out_is_terminal() else out
        colours.write(pieces, options.color)
    if not result.facts:
        raise Unreachable("no host answers")
    return 3 if result.unreachable else 1 if fails else 0


def document(result: Preflight, problems: Sequence[CheckFinding], *, ok: bool) -> dict[str, object]:
    """Return the JSON document."""
    return {
        "ok": ok,
        "nodes": result.facts,
        "unreachable": {name: dataclasses.asdict(failure) for name, failure in result.unreachable.items()},
        "reach": result.reach,
        "collectives": result.collectives,
        "findings": [dataclasses.asdict(finding) for finding in problems],
    }


def wrapped(line: str, columns: int) -> list[str]:
    """Return a line wrapped to this many columns; continuation lines are indented below the value."""
    head = HEAD.match(line)
    indent = head.end() if head is not None and head.end() < columns // 2 else 4
    pieces = textwrap.wrap(line, columns, subsequent_indent=" " * indent, break_on_hyphens=False)
    return pieces or [""]


def _outcome(group: GroupOutcome) -> str:
    if "error" in group:
        return group["error"]
    speed = f"{group['bus_gb_per_s']:g} GB/s, latency {group['latency_ms']:g} ms"
    return f"{group['ms']:g} ms for 16 MiB ({group['backend']}, {speed})"


def lines(result: Preflight, rows: Sequence[FactRow], problems: Sequence[CheckFinding]) -> list[str]:
    """Return the facts, each value with its nodes on a line of its own, then the findings."""
    width = max((len(row.fact) for row in rows), default=0)
    out = []
    for row in rows:
        for place, (value, nodes) in enumerate(row.values):
            mark = "!" if row.odd and place else " "
            out.append(f"{(row.fact if not place else ''):<{width}} {mark} {value}  {fold(nodes)}")
    open_links = [
        (hop["ms"], one, other) for one, hops in result.reach.items() for other, hop in hops.items() if "ms" in hop
    ]
    if open_links:
        ms, one, other = max(open_links)
        text = f"{len(open_links)} connections between nodes work; the slowest is {one} to {other}: {ms:g} ms"
        out.append(f"{'reach':<{width}}   {text}")
    out += [
        f"{'all-reduce':<{width}}   round {group['round']}  {fold(group['nodes'])}  {_outcome(group)}"
        for group in result.collectives or ()
    ]
    out.append("")
    out += [f"error    {failure}" for failure in together(result.unreachable.values())]
    for finding in problems:
        out.append(f"{finding.severity:<8} {fold(finding.nodes)}: {finding.text}")
        if finding.hint:
            out.append(f"         {finding.hint}")
    return [*out, verdict(result, problems)]


def verdict(result: Preflight, problems: Sequence[CheckFinding]) -> str:
    """Return in one line whether a job on these hosts would start, and what stands against it."""
    errors, warnings = ([one for one in problems if one.severity == severity] for severity in ("error", "warning"))
    if not problems and not result.unreachable:
        return f"{count(len(result.facts), 'host')}, no problems found"
    reasons = []
    if result.unreachable:
        total = len(result.facts.keys() | result.unreachable.keys())
        reasons.append(f"{len(result.unreachable)} of {count(total, 'host')} unusable ({fold(result.unreachable)})")
    if errors:
        reasons.append(f"{count(len(errors), 'error')} on {fold({name for one in errors for name in one.nodes})}")
    if warnings:
        reasons.append(count(len(warnings), "warning"))
    word = "fail" if errors or result.unreachable else "start"
    return f"a job on these hosts would {word}{': ' if reasons else ''}{', '.join(reasons)}"

"""`supervisor check`: what a launch would find on the hosts, and which of them is the odd one out.

In: argv. Out: a matrix of facts and findings, or one JSON document.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from supervisor.cli.entry import say
from supervisor.cli.options import add_json, load_inventory, make_parser, parse, split_target
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import Unreachable, UsageError
from supervisor.inventory.pattern import fold

if TYPE_CHECKING:
    from supervisor.session.finding import Finding
    from supervisor.session.oddities import Row
    from supervisor.session.preflight import Preflight


# A label, its words one space apart, and what separates it from the value.
HEAD = re.compile(r"(?:\S+(?: \S+)*)? *")


def run(verb: str, argv: Sequence[str]) -> int:
    """Check the hosts; returns 0 fine (warnings too), 1 something would stop a job, 3 a host cannot be reached."""
    parser = make_parser(verb, "[HOSTS]")
    parser.add_argument("--collectives", action="store_true", help="all-reduce in pairs, to find a bad node (torch)")
    add_json(parser)
    options = parse(parser, argv)
    hosts, job = split_target(options.target)
    if job is not None:
        raise UsageError(f"check takes no JOB: {job}", f"supervisor status {job}")
    inventory = load_inventory(hosts, options)
    from supervisor.session.oddities import findings, matrix
    from supervisor.session.preflight import preflight

    tell = (lambda text: None) if options.json else say
    found = asyncio.run(preflight(inventory, collectives=options.collectives, say=tell))
    said = findings(found)
    stops = any(finding.severity == "error" for finding in said)
    if options.json:
        write_json(document(found, said, ok=not stops and not found.unreachable))
    else:
        out = lines(found, matrix(found), said)
        columns = shutil.get_terminal_size().columns
        write_lines([piece for line in out for piece in wrapped(line, columns)] if sys.stdout.isatty() else out)
    if not found.facts:
        raise Unreachable("no host answers")
    return 3 if found.unreachable else 1 if stops else 0


def document(found: Preflight, said: Sequence[Finding], *, ok: bool) -> dict[str, object]:
    """Return the JSON twin."""
    return {
        "ok": ok,
        "nodes": found.facts,
        "unreachable": {name: dataclasses.asdict(failure) for name, failure in found.unreachable.items()},
        "reach": found.reach,
        "collectives": found.collectives,
        "findings": [dataclasses.asdict(finding) for finding in said],
    }


def wrapped(line: str, columns: int) -> list[str]:
    """Return a line in pieces of at most so many columns; what follows is indented below the first column's value."""
    head = HEAD.match(line)
    indent = head.end() if head is not None and head.end() < columns // 2 else 4
    pieces = textwrap.wrap(line, columns, subsequent_indent=" " * indent, break_on_hyphens=False)
    return pieces or [""]


def _outcome(group: Mapping[str, Any]) -> str:
    if "error" in group:
        return str(group["error"])
    speed = f"{group['bus_gb_per_s']:g} GB/s, latency {group['latency_ms']:g} ms"
    return f"{group['ms']:g} ms for 16 MiB ({group['backend']}, {speed})"


def lines(found: Preflight, rows: Sequence[Row], said: Sequence[Finding]) -> list[str]:
    """Return the matrix, a fact's values one below the other with the nodes that have it, then what is odd."""
    width = max((len(row.fact) for row in rows), default=0)
    out = []
    for row in rows:
        for place, (value, nodes) in enumerate(row.values):
            mark = "!" if row.odd and place else " "
            out.append(f"{(row.fact if not place else ''):<{width}} {mark} {value}  {fold(nodes)}")
    open_links = [
        (hop["ms"], one, other) for one, hops in found.reach.items() for other, hop in hops.items() if "ms" in hop
    ]
    if open_links:
        ms, one, other = max(open_links)
        text = f"{len(open_links)} links between nodes are open, the slowest from {one} to {other}: {ms:g} ms"
        out.append(f"{'reach':<{width}}   {text}")
    out += [
        f"{'all-reduce':<{width}}   round {group['round']}  {fold(group['nodes'])}  {_outcome(group)}"
        for group in found.collectives or ()
    ]
    out.append("")
    out += [f"error    {failure}" for failure in found.unreachable.values()]
    for finding in said:
        out.append(f"{finding.severity:<8} {fold(finding.nodes)}: {finding.text}")
        if finding.hint:
            out.append(f"         {finding.hint}")
    if not said and not found.unreachable:
        out.append(f"{len(found.facts)} host(s), nothing odd")
    return out

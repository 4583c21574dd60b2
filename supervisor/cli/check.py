"""`supervisor check`: what a launch would find on the hosts, and which of them is the odd one out.

In: argv. Out: a matrix of facts and findings, or one JSON document.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from supervisor.cli.entry import say
from supervisor.cli.options import add_json, load_inventory, make_parser, parse, split_target
from supervisor.cli.output import write_json, write_lines
from supervisor.errors import Unreachable, UsageError
from supervisor.inventory.pattern import fold

if TYPE_CHECKING:
    from supervisor.session.oddities import Finding, Row
    from supervisor.session.preflight import Preflight


def run(verb: str, argv: Sequence[str]) -> int:
    """Check the hosts; returns 0 fine (warnings too), 1 something would stop a job, 3 a host cannot be reached."""
    parser = make_parser(verb, "[HOSTS] [--collectives] [--json]")
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
        write_lines(lines(found, matrix(found), said))
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
    for group in found.collectives or ():
        outcome = group.get("error") or f"{group['ms']:g} ms ({group['backend']})"
        out.append(f"{'all-reduce':<{width}}   round {group['round']}  {fold(group['nodes'])}  {outcome}")
    out.append("")
    out += [f"error    {failure}" for failure in found.unreachable.values()]
    for finding in said:
        out.append(f"{finding.severity:<8} {fold(finding.nodes)}: {finding.text}")
        if finding.hint:
            out.append(f"         {finding.hint}")
    if not said and not found.unreachable:
        out.append(f"{len(found.facts)} host(s), nothing odd")
    return out

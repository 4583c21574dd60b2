"""A post-mortem for people, as Markdown that reads well as plain text too. Pure.

In: the document of `facts.report`. Out: lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from supervisor import plain
from supervisor.inventory.pattern import fold
from supervisor.plain_incident import incident_lines

Json = Mapping[str, Any]
# More of one kind in a row are told as one line.
ALIKE = 3


def lines(report: Json) -> list[str]:
    """Return the whole report."""
    return [
        f"# Post-mortem of {_cell(report['job'])}",
        "",
        *_table(["", ""], _header(report)),
        *_verdicts(report["incidents"]),
        *_generations(report["generations"]),
        *_membership(report["membership"]),
        *_timeline(report["timeline"]),
        *_environment(report["environment"]),
        *_nccl(report["nccl"]),
    ]


def _cell(value: object) -> str:
    return "-" if value is None or value == "" else plain.one_line(value).replace("|", "\\|")


def _code(value: object) -> str:
    text = plain.one_line(value).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _fenced(text: Sequence[str]) -> list[str]:
    fence = "````" if any("```" in line for line in text) else "```"
    return [fence, *text, fence]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    bar = [f"|{'|'.join('---' for _ in head)}|"]
    return [f"| {' | '.join(head)} |", *bar, *(f"| {' | '.join(row)} |" for row in rows)]


def _header(report: Json) -> Iterator[list[str]]:
    nodes = report["nodes"]
    reason = f": {_cell(report['reason'])}" if report["reason"] else ""
    yield ["how it ended", f"**{_cell(report['state'])}**{reason}"]
    yield ["script", _code(" ".join(map(str, (report["script"] or "?", *report["args"]))))]
    yield ["began", _cell(report["started_at"])]
    ended, lasted = report["ended_at"], report["lasted_s"]
    yield ["ended", _cell(ended) if ended else "not yet"]
    yield ["lasted", _lasted(lasted)]
    yield ["nodes", f"{_cell(fold([node['name'] for node in nodes]))}, world size {_cell(report['world_size'])}"]
    yield ["coordinator", _cell(report["coordinator"])]
    yield ["restarts charged", f"{_cell(report['charged_restarts'])} of {_cell(report['max_restarts'])}"]


def _lasted(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = int(seconds)
    return f"{seconds:.1f} s" if seconds < 100 else f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"


def _verdicts(incidents: Sequence[Json]) -> Iterator[str]:
    yield from ("", "## What failed", "")
    if not incidents:
        yield "Nothing that a verdict was made of."
    for incident in incidents:
        traceback = incident.get("traceback")
        first, summary, *rest = incident_lines(incident, traceback=False)
        yield from (f"### {plain.one_line(summary)}", "", f"* {first}")
        for line in rest:
            # What belongs to the line before is indented once more.
            yield f"{'  ' * ((len(line) - len(line.lstrip()) - 2) // 2)}* {line.strip()}"
        if traceback:
            yield from ("", *_fenced(plain.safe(traceback).rstrip("\n").splitlines()))
        yield ""


def _generations(rows: Sequence[Json]) -> Iterator[str]:
    yield from ("## Launch and restarts, ms", "")
    names = [f"{name}_ms" for name in plain.PHASES]
    head = ["generation", "running at", "cause", "ranks", *plain.PHASES, "total", "steps", "steps lost"]
    yield from _table(
        head,
        (
            [
                str(row["generation"]),
                _cell(plain.clock(row["time"])),
                _cell(row["cause"]),
                _cell(row["world_size"]),
                *(_cell(row[name]) for name in (*names, "total_ms")),
                "-" if row["first_step"] is None else f"{row['first_step']}-{row['last_step']}",
                _cell(row["steps_lost"]),
            ]
            for row in rows
        ),
    )


def _membership(rows: Sequence[Json]) -> Iterator[str]:
    if rows:
        yield from ("", "## Who came, who went, who asked for it", "")
        yield from _table(
            ["time", "what", "node", "by", ""],
            (
                [
                    _cell(plain.clock(row["time"])),
                    _cell(str(row["type"]).replace("_", " ")),
                    _cell(row["node"]),
                    _cell(row["by"]),
                    "" if row["text"] == row["by"] else _cell(row["text"]),
                ]
                for row in rows
            ),
        )


def _timeline(rows: Sequence[Json]) -> Iterator[str]:
    yield from ("", "## Timeline (UTC)", "", *_fenced(list(_moments(rows))))


def _moments(rows: Sequence[Json]) -> Iterator[str]:
    for alike in _runs(rows):
        shown = alike if len(alike) <= ALIKE else alike[:1]
        for row in shown:
            yield _moment(row)
        if len(shown) < len(alike):
            rest = alike[1:]
            ranks = [row["rank"] for row in rest if row["rank"] is not None]
            who = f"ranks {plain.ranges(ranks)}" if ranks else f"{fold([row['node'] or '?' for row in rest])}"
            yield f"{plain.clock(rest[-1]['time'])} … and {len(rest)} more until then: {who}"


def _moment(row: Json) -> str:
    group = "" if row["generation"] is None or row["generation"] < 0 else f"g{row['generation']}"
    place = " ".join(word for word in (row["node"] or "", "" if row["rank"] is None else f"rank {row['rank']}") if word)
    text = plain.one_line(row["text"])
    return f"{plain.clock(row['time'])} {row['type']!s:<20} {group:<4} {place:<14} {text}".rstrip()


def _runs(rows: Sequence[Json]) -> Iterator[list[Json]]:
    """Yield rows of one type and generation that follow each other."""
    run: list[Json] = []
    for row in rows:
        if run and (run[0]["type"], run[0]["generation"]) != (row["type"], row["generation"]):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _environment(rows: Sequence[Json]) -> Iterator[str]:
    yield from ("", "## Environment", "")
    if not rows:
        yield "No host was in reach."
        return
    yield from _table(
        ["fact", "value", "nodes"],
        (
            [_cell(row["fact"]) if not place else "", _code(one["value"]), _cell(fold(one["nodes"]))]
            for row in rows
            for place, one in enumerate(row["values"])
        ),
    )


def _nccl(facts: Json | None) -> Iterator[str]:
    yield from ("", "## NCCL", "")
    if facts is None:
        yield "The logs hold no line of NCCL."
        return
    for name, value in facts.items():
        if name != "warnings" and value not in (None, [], ""):
            yield f"* {name}: {_cell(' '.join(map(str, value)) if isinstance(value, list) else value)}"
    for warning in facts.get("warnings") or ():
        yield f"* warning: {_code(warning)}"

"""torch's flight records: which collective each rank called, and where the ranks part. Pure.

In: a record of each rank, parsed, as `_dump_fr_trace` and `_dump_fr_trace_json` of torch write it. Out: a
Parting, or None where all ranks agree and have finished.

torch numbers the collectives of a group on each rank: call 5 of one rank must be call 5 of every other member. The
number, the operation and its sizes are compared; of calls that are no collectives (send, recv), nothing. A ring buffer
loses its oldest calls: what a rank no longer has is not compared.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Optional, TypedDict

from remote_agent.text.names import name_ranks
from remote_agent.wire.documents import Count, RankNumber, TimeNs
from remote_agent.wire.gate import Misfit, parse, reader, row

DEFAULT_GROUP = "0"
_DEFAULT = "default_pg"
_Frame = TypedDict("_Frame", {"name": str, "filename": str, "line": Count})
_SIZES = Optional[list[list[int]]]
# What has the type Any here may be anything: versions of torch differ in it.
FlightEntry = TypedDict(
    "FlightEntry",
    {"process_group": Annotated[list[Any], row(Any, Any)], "collective_seq_id": Count, "timeout_ms": Optional[float],
     "time_created_ns": Optional[TimeNs], "time_discovered_completed_ns": Optional[TimeNs],
     "frames": Optional[list[_Frame]],
     "input_sizes": _SIZES, "output_sizes": _SIZES, "input_dtypes": Optional[list[str]], "is_p2p": Any, "pg_id": Any,
     "profiling_name": Any, "retired": Any, "state": Any},
    total=False,
)  # fmt: skip
_Entry = Annotated[FlightEntry, reader(FlightEntry, "process_group", "collective_seq_id")]
FlightGroup = TypedDict("FlightGroup", {"ranks": Optional[str]}, total=False)
FlightRecord = TypedDict(
    "FlightRecord", {"entries": Optional[list[_Entry]], "pg_config": Optional[dict[str, FlightGroup]]}, total=False
)
read_record = reader(FlightRecord)
_read_ranks = reader(list[RankNumber])
# In these, all ranks give or get the same number of elements. In others, such as all_to_all, numbers may differ.
_EQUAL = frozenset(
    {"all_reduce", "allreduce", "broadcast", "reduce", "reduce_scatter", "all_gather_base", "reduce_scatter_base"}
)
# In these, only one rank has inputs, or the numbers may differ where the backend allows it.
_EQUAL_WHILE_OPEN = frozenset({"all_gather", "gather"})
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python3|/torch/(?:distributed|nn|autograd|_\w+)/|<frozen ")
# On another rank, the same call is searched for at most this many calls away.
_NEAR = 8
_MAX_LINES = 12
_MAX_SIZES = 60
_MAX_SIDES = 4
_MAX_DIMENSIONS = 64


class Call(NamedTuple):
    """One call of a collective by one rank."""

    seq: int
    op: str
    sizes: str
    elements: int
    """The number of elements of its inputs; of a scatter, of its outputs."""
    dtypes: str
    done: bool
    failed: bool
    """Whether it may have ended by a timeout: gloo's record does not say which calls are complete."""
    place: str = ""
    """The line of the script, such as `train.py:88 in step`; empty: unknown."""
    at_ns: int = 0

    @property
    def text(self) -> str:
        """The operation and its number."""
        return f"{self.op} {self.seq}"

    def is_like(self, other: Call) -> bool:
        """Return whether two calls at any number could be parts of the same collective."""
        return self.op == other.op and not _differs(self, other)


@dataclasses.dataclass(frozen=True)
class GroupCalls:
    """The calls of one rank in one process group."""

    name: str
    title: str
    """What the script calls the group; empty: nothing."""
    members: Sequence[int] | None
    """None: the record does not have them (gloo's)."""
    calls: Mapping[int, Call]

    @property
    def last(self) -> int:
        """The number of the newest call."""
        return max(self.calls, default=0)

    @property
    def first_open(self) -> Call | None:
        """The oldest call that is not done."""
        return next((self.calls[seq] for seq in sorted(self.calls) if not self.calls[seq].done), None)


Record = Mapping[str, GroupCalls]
"""The calls of one rank by group."""


@dataclasses.dataclass(frozen=True)
class Parting:
    """The first difference. `kind`: op, size, dtype, order, left_out, extra, group, ahead, missing, unfinished."""

    kind: str
    culprits: tuple[int, ...]
    headline: str
    call: Call
    group: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    lines: tuple[tuple[int, str], ...]
    """A line of evidence for each rank."""
    is_sure: bool = True
    """False where records are missing, or as many ranks are on one side as on the other."""
    stacks: Mapping[int, str] = dataclasses.field(default_factory=dict)


def read(document: object) -> Record:
    """Return the calls of a rank by group; raises Misfit for a document of another shape."""
    known = read_record(document)
    config = known.get("pg_config") or {}
    calls: dict[str, dict[int, Call]] = {}
    titles: dict[str, str] = {}
    for one in newest(collectives(known)):
        key, title = group_key(one), str(one["process_group"][1] or "")
        titles[key] = "" if title in ("undefined", _DEFAULT) else title
        call = call_of(one)
        calls.setdefault(key, {})[call.seq] = call
    return {
        key: GroupCalls(key, titles[key], members_of(config.get(group_name(key))), own) for key, own in calls.items()
    }


def collectives(document: FlightRecord) -> list[FlightEntry]:
    """Return the entries of a record that are collectives."""
    return [one for one in document.get("entries") or () if not one.get("is_p2p")]


def newest(entries: Sequence[FlightEntry]) -> list[FlightEntry]:
    """Return the entries of existing groups: an earlier group of the same name may have been destroyed."""
    latest = {group_key(one): one.get("pg_id") for one in entries}
    return [one for one in entries if one.get("pg_id") == latest[group_key(one)]]


def group_key(entry: FlightEntry) -> str:
    """Return the group and, unless that is gloo, the backend of an entry: each backend numbers its own collectives."""
    name, backend = str(entry["process_group"][0]), backend_of(entry)
    return name if backend in ("", "gloo") else f"{name}/{backend}"


def group_name(key: str) -> str:
    """Return the name that torch gave to a group."""
    return key.partition("/")[0]


def op_of(entry: FlightEntry) -> str:
    """Return the name of the operation."""
    call = str(entry.get("profiling_name") or "collective")
    return call.partition(":")[2] or call


def backend_of(entry: FlightEntry) -> str:
    """Return the backend, empty where the record does not name it."""
    return str(entry.get("profiling_name") or "").rpartition(":")[0]


def is_done(entry: FlightEntry) -> bool:
    """Whether the call has ended; gloo's remain `scheduled`."""
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def members_of(config: FlightGroup | None) -> list[int] | None:
    """Return the members of a group, None where the record does not have them."""
    try:
        ranks = _read_ranks(parse((config or {}).get("ranks") or ""))
    except Misfit:
        return None
    return ranks or None


def merged(documents: Sequence[FlightRecord]) -> FlightRecord:
    """Return the records of several backends of one rank as one."""
    entries = [one for document in documents for one in document.get("entries") or ()]
    groups: dict[str, FlightGroup] = {}
    for document in documents:
        groups.update(document.get("pg_config") or {})
    return {"entries": entries, "pg_config": groups}


def newest_rows(entries: Sequence[FlightEntry]) -> list[list[Any]]:
    """Return the newest of these entries as rows that a wire can carry, for `from_rows`."""
    return [list(call_of(one)) for one in entries[-_NEAR:]]


def from_rows(rows: Mapping[str, Sequence[Sequence[Any]]], where: Mapping[str, str]) -> Record:
    """Return the calls of a live rank from its rows by group; where: the line at which it waits, by group."""
    calls = {name: [Call(*row) for row in own] for name, own in rows.items()}
    placed = {
        name: {call.seq: call if call.done else call._replace(place=where[name]) for call in own}
        for name, own in calls.items()
    }
    return {name: GroupCalls(name, "", None, own) for name, own in placed.items()}


def call_of(entry: FlightEntry) -> Call:
    """Return a call from its entry."""
    op = op_of(entry).lstrip("_").replace("_oop", "")
    sizes = (entry.get("output_sizes") if op == "scatter" else entry.get("input_sizes")) or []
    # A damaged record may claim any lengths.
    elements = sum(math.prod(max(0, min(length, 1 << 32)) for length in size[:_MAX_DIMENSIONS]) for size in sizes)
    text = str(sizes[0] if len(sizes) == 1 else sizes)
    sizes_text = text if len(text) <= _MAX_SIZES else f"{text[: _MAX_SIZES - 1]}…"
    dtypes = " ".join(dict.fromkeys(entry.get("input_dtypes") or ()))[:_MAX_SIZES]
    at_ns, done = entry.get("time_created_ns") or 0, is_done(entry)
    return Call(
        entry["collective_seq_id"],
        op,
        sizes_text,
        elements,
        dtypes,
        done,
        done and entry.get("state") != "completed",
        _place(entry),
        at_ns,
    )


def _place(entry: FlightEntry) -> str:
    """Return the innermost line of the script."""
    frames = entry.get("frames") or ()
    own = next((frame for frame in frames if not _LIBRARIES.search(frame["filename"])), None)
    return "" if own is None else f"{os.path.basename(own['filename'])}:{own['line']} in {own['name']}"


def _differs(ours: Call, theirs: Call) -> str:
    """Return what two calls of the same operation do not share: size, dtype, or nothing."""
    op, is_open = ours.op, not (ours.done and theirs.done)
    if op in _EQUAL or (op in _EQUAL_WHILE_OPEN and is_open) or op == "scatter":
        if ours.elements != theirs.elements:
            return "size"
        # In a scatter, only the root has inputs.
        return "dtype" if ours.dtypes != theirs.dtypes and op != "scatter" else ""
    return ""


class _Group:
    """One process group as all ranks recorded it."""

    def __init__(self, name: str, own: Mapping[int, GroupCalls], everyone: Iterable[int]) -> None:
        self.name = name
        self.own = dict(own)
        listed = next((each.members for each in own.values() if each.members), None)
        # gloo's record does not list the members of a group: then they are the ranks that have used it.
        torch_name = group_name(name)
        self.members = sorted(listed if listed else everyone if torch_name == DEFAULT_GROUP else own)
        title = next((each.title for each in own.values() if each.title), "")
        more = f" ({title})" if title else ""
        self.label = "" if torch_name == DEFAULT_GROUP else f" of group {torch_name}{more}"
        firsts = [min(each.calls) for each in own.values() if each.calls]
        self.start = max(firsts, default=0)

    def at(self, seq: int) -> dict[int, Call]:
        """Return the ranks' calls with this number."""
        return {rank: each.calls[seq] for rank, each in self.own.items() if seq in each.calls}

    def waits(self) -> dict[int, Call]:
        """Return the oldest call that is not done of each rank that has one."""
        return {rank: call for rank, each in self.own.items() if (call := each.first_open) is not None}

    def ahead(self) -> dict[int, Call]:
        """Return the newest call of the ranks that made one which others did not, and which may have failed."""
        lasts = {rank: self.own[rank].last if rank in self.own else 0 for rank in self.members}
        most = max(lasts.values(), default=0)
        newest_calls = self.at(most) if most > min(lasts.values(), default=0) else {}
        return {rank: call for rank, call in newest_calls.items() if call.failed}

    def first_difference(self) -> int | None:
        """Return the first number at which ranks made different calls."""
        for seq in sorted({seq for each in self.own.values() for seq in each.calls if seq >= self.start}):
            calls = list(self.at(seq).values())
            if any(not call.is_like(calls[0]) for call in calls[1:]):
                return seq
        return None


def mismatch(records: Mapping[int, Record]) -> Parting | None:
    """Return the first collective that ranks called differently; None if all calls agree, finished or not."""
    return _first_mismatch(_groups(records, records))


def _groups(records: Mapping[int, Record], everyone: Iterable[int]) -> list[_Group]:
    names = sorted({name for record in records.values() for name in record})
    return [
        _Group(name, {rank: record[name] for rank, record in records.items() if name in record}, everyone)
        for name in names
    ]


def _first_mismatch(groups: Iterable[_Group]) -> Parting | None:
    partings = [parting for group in groups if (parting := _mismatch(group)) is not None]
    return min(partings, key=lambda parting: parting.call.at_ns, default=None)


def compare(records: Mapping[int, Record], world: Iterable[int] = ()) -> Parting | None:
    """Return where these ranks part; `world`: all ranks, as far as they are known besides.

    It is None if all ranks made the same calls and have finished them.
    """
    listed = {rank for record in records.values() for each in record.values() for rank in each.members or ()}
    everyone = {*world, *listed, *range(max(records, default=-1) + 1)}
    groups = _groups(records, everyone)
    return _first_mismatch(groups) or _held_up(groups, records)


def _mismatch(group: _Group) -> Parting | None:
    seq = group.first_difference()
    if seq is None:
        return None
    calls = group.at(seq)
    sides: list[list[int]] = []
    for rank, call in sorted(calls.items()):
        side = next((side for side in sides if calls[side[0]].is_like(call)), None)
        if side is None:
            sides.append([rank])
        else:
            side.append(rank)
    sides.sort(key=len)
    odd, usual = sides[0], sides[-1]
    is_clear = len(odd) < len(usual)
    kind, headline = _part(group, seq, odd, usual)
    others = [rank for rank in calls if rank not in odd]
    return Parting(
        kind,
        tuple(odd) if is_clear else tuple(sorted([*odd, *others])),
        headline if is_clear else f"{name_ranks(odd)} {headline}",
        calls[usual[0]],
        group.name,
        tuple(sorted(others)),
        tuple(odd) if is_clear else (),
        _lines(calls, group),
        is_sure=is_clear,
        stacks={rank: call.place for rank, call in calls.items() if call.place},
    )


def _part(group: _Group, seq: int, odd: Sequence[int], usual: Sequence[int]) -> tuple[str, str]:
    """Return the kind of a mismatch, and what the odd ranks did where the usual ones did something else."""
    ours, theirs = group.own[odd[0]].calls, group.own[usual[0]].calls
    call, other, who = ours[seq], theirs[seq], name_ranks(usual)
    after, later = ours.get(seq + 1), theirs.get(seq + 1)
    at = _at(call)
    if after is not None and later is not None and call.is_like(later) and after.is_like(other):
        what = f"{call.op} {call.sizes} before {other.op} {other.sizes}"
        return "order", f"called {what}{group.label}{at}, {who} in the other order"
    if _is_shifted(ours, theirs, seq):
        what = f"{other.op} {other.sizes} (number {seq}{group.label})"
        return "left_out", f"left out {what}, which {who} called{_at(other)}; went on with {call.op}{at}"
    if _is_shifted(theirs, ours, seq):
        return "extra", f"called {call.text} {call.sizes}{group.label}{at} in addition to what {who} called"
    if call.op != other.op:
        return "op", f"called {call.text}{group.label}{at} where {who} called {other.op}{_at(other)}"
    if call.elements != other.elements:
        what = f"with {call.elements} elements {call.sizes}{at}, {who} with {other.elements} {other.sizes}{_at(other)}"
        return "size", f"called {call.text}{group.label} {what}"
    what = f"with {call.dtypes or 'no type'}{at}, {who} with {other.dtypes or 'no type'}{_at(other)}"
    return "dtype", f"called {call.text}{group.label} {what}"


def _at(call: Call) -> str:
    return f" at {call.place}" if call.place else ""


def _is_shifted(short: Mapping[int, Call], whole: Mapping[int, Call], seq: int) -> bool:
    """Return whether two or more calls of one rank, from a number on, are the other one's from the next number on."""
    pairs = [(short[n], whole[n + 1]) for n in range(seq, seq + _NEAR) if n in short and n + 1 in whole]
    return len(pairs) > 1 and all(one.is_like(other) for one, other in pairs)


def _held_up(groups: Sequence[_Group], records: Mapping[int, Record]) -> Parting | None:
    """Return which ranks the others wait for, where all that was called agrees."""
    waits = {group.name: group.waits() for group in groups}
    if not any(waits.values()):
        # gloo ends a call that has timed out: then the newest call shows who is missing.
        waits = {group.name: group.ahead() for group in groups}
    held = [group for group in groups if waits[group.name]]
    anywhere = {rank for own in waits.values() for rank in own}
    delays = []
    for group in held:
        own = waits[group.name]
        seq = min(call.seq for call in own.values())
        waiting = sorted(rank for rank, call in own.items() if call.seq == seq)
        absent = [rank for rank in group.members if rank not in group.own or group.own[rank].last < seq]
        delays.append((group, own[waiting[0]], waiting, absent))
    # A rank that waits in another group is itself held up; ranks that wait nowhere come first.
    for group, call, waiting, absent in delays:
        if free := [rank for rank in absent if rank not in anywhere]:
            return _missing(group, call, waiting, free, records)
    if any(absent for *_, absent in delays):
        return _crossed(groups, waits)
    if not delays:
        return None
    group, call, waiting, _ = max(delays, key=lambda each: len(each[0].members))
    every = len(group.members)
    where = f"{call.text}{group.label}{_at(call)}"
    who = "none of them" if len(waiting) == every else f"{name_ranks(waiting)} did not"
    text = f"all {every} ranks entered {where}, and {who} {'finished it' if len(waiting) == every else 'finish it'}"
    calls = group.at(call.seq)
    return Parting("unfinished", (), text, call, group.name, tuple(waiting), (), _lines(calls, group), is_sure=False)


def _missing(
    group: _Group, call: Call, waiting: Sequence[int], absent: Sequence[int], records: Mapping[int, Record]
) -> Parting:
    """Return the parting of ranks that never entered a collective; of ranks that are fewer than those."""
    lost = [rank for rank in absent if rank not in records]
    where = f"{call.text} {call.sizes}{group.label}"
    lasts = {rank: last for rank in absent if (last := _newest_call(records.get(rank, {}))) is not None}
    lines = _lines({rank: group.own[rank].calls[call.seq] for rank in waiting}, group)
    lines += tuple((rank, f"last call: {last.text} {last.sizes}{_at(last)}") for rank, last in lasts.items())
    lines += tuple((rank, "no flight record") for rank in lost)
    stacks = {rank: f"{last.place}, its last call" for rank, last in lasts.items() if last.place}
    if len(waiting) < len(absent) and not lost:
        text = f"entered {where}{_at(call)}, which {name_ranks(absent)} never entered"
        return Parting("ahead", tuple(waiting), text, call, group.name, (), tuple(absent), lines, stacks=stacks)
    who = f"{name_ranks(waiting)} waiting in it{_at(call)}"
    if lost == list(absent):
        text = f"left no flight record, and may have ended before {where}; {who}"
    else:
        last = next(iter(lasts.values()), None)
        after = f" after {last.text}{_at(last)}" if last is not None else ""
        text = f"never entered {where}{after}; {who}"
    missing = tuple(absent)
    is_sure = not lost and len(waiting) > 1
    return Parting(
        "missing", missing, text, call, group.name, tuple(waiting), missing, lines, is_sure=is_sure, stacks=stacks
    )


def _crossed(groups: Sequence[_Group], waits: Mapping[str, Mapping[int, Call]]) -> Parting:
    """Return the parting of ranks that wait for each other in different groups."""
    labels = {group.name: group.label or " of the default group" for group in groups}
    oldest: dict[int, tuple[str, Call]] = {}
    for name, own in waits.items():
        for rank, call in own.items():
            if rank not in oldest or call.at_ns < oldest[rank][1].at_ns:
                oldest[rank] = name, call
    sides: dict[str, list[int]] = {}
    for rank in sorted(oldest):
        sides.setdefault(oldest[rank][0], []).append(rank)
    ordered = sorted(sides, key=lambda name: len(sides[name]))
    texts = {name: f"{(call := oldest[ranks[0]][1]).text}{labels[name]}{_at(call)}" for name, ranks in sides.items()}
    lines = tuple(
        (rank, f"waiting in {call.text} {call.sizes}{labels[n]}{_at(call)}") for rank, (n, call) in oldest.items()
    )
    # If there are two sides, the smaller one is in the wrong group.
    is_sure = len(ordered) == 2 and len(sides[ordered[0]]) < len(sides[ordered[1]])
    usual = ordered[-1]
    if is_sure:
        culprits = sides[ordered[0]]
        text = f"waiting in {texts[ordered[0]]}, {name_ranks(sides[usual])} in {texts[usual]}"
    else:
        culprits = sorted(oldest)
        places = ", ".join(f"{name_ranks(sides[name])} in {texts[name]}" for name in ordered[:_MAX_SIDES])
        text = f"ranks waiting for each other in different groups: {places}"
    waiting = [rank for rank in sides[usual] if is_sure or rank not in culprits]
    call = oldest[sides[usual][0]][1]
    stacks = {rank: oldest[rank][1].place for rank in culprits if oldest[rank][1].place}
    missing = tuple(culprits) if is_sure else ()
    return Parting("group", tuple(culprits), text, call, usual, tuple(waiting), missing, lines, is_sure, stacks)


def _newest_call(record: Record) -> Call | None:
    calls = [each.calls[max(each.calls)] for each in record.values() if each.calls]
    return max(calls, key=lambda call: call.at_ns, default=None)


def _lines(calls: Mapping[int, Call], group: _Group) -> tuple[tuple[int, str], ...]:
    """Return a line for each rank's call; of many equal ones, for the first ranks of each."""
    texts = {
        rank: f"{call.text} {call.sizes} {call.dtypes}".rstrip()
        + f"{group.label}, {'ended' if call.done else 'not ended'}{_at(call)}"
        for rank, call in sorted(calls.items())
    }
    seen: Counter[str] = Counter()
    kept = []
    for rank, text in texts.items():
        seen[text] += 1
        if len(texts) <= _MAX_LINES or seen[text] <= 2:
            kept.append((rank, text))
    return tuple(kept)

"""What must hold whatever fails, in words, and the judges of it.

1. *One group.* Once a group has made its first step, no process of an earlier group makes another one. The only
   exception: where all processes of a machine were stopped, nothing on it can end its ranks before it is woken; they
   may make steps for `WAKING_S` after that.
2. *No orphan.* Within `GONE_S` after the answer to `stop`, no process of the job is left on any host: no agent, no
   engine, no rank, and none that a rank started.
3. *Logs.* Every byte that the kernel took from a rank is in that rank's log, in order and once. After the last step
   that was noted there may be what one more prints. What `supervisor logs --raw` prints is the file.
4. *Journal.* On every node it is complete JSON lines, numbered from 1 without a gap, and the same on all nodes once the
   job is over. A node that was out of the job when it ended has the beginning.
5. *Back.* Within `BACK_S` after healing, one group that has ranks on all hosts makes steps, and each host has an agent
   and the whole journal.
6. *Status.* What `status --watch` has printed last disagrees with the ranks that make steps on no process for longer
   than `FALSE_S`; not while the operator's machine reaches no agent, nor about processes that the case has stopped.
7. *Verbs.* Every command ends within `ANSWER_S`, without a traceback.

In: the ranks' own notes (`ranks`), the nodes' files, the processes of the hosts, what commands printed. Nothing here
uses the code of the program. Out: violations, and the figures by which one sees how far from one a case was.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.faults.ranks import Rank, printed

WAKING_S = 1.0
GONE_S = 30.0
BACK_S = 60.0
FALSE_S = 10.0
ANSWER_S = 30.0
_NS = 10**9
_LOOK_S = 0.25
_STEPPING_S = 1.5
"""A process that has made no step for as long does not step; a busy machine may hold one up."""
_LIVING = {"starting", "running", "silent"}
_OUT = {"node_lost", "node_failed"}
_LEFT_OUT = {" in 10 minutes, last: ": 3, "failed alone twice before the first step": 2}
"""Words of the reason for which a node is left out, and how often that has to happen."""


@dataclass(frozen=True)
class Violation:
    """One invariant that did not hold."""

    invariant: str
    text: str


@dataclass(frozen=True)
class Awake:
    """A process that was stopped together with all others of its machine, and when it could go on."""

    pid: int
    since_ns: int


@dataclass(frozen=True)
class Document:
    """A status as it was printed, and when."""

    t_ns: int
    status: Mapping[str, Any]


def overlap_ms(ranks: Iterable[Rank], awake: Iterable[Awake] = (), since_ns: int = 0) -> tuple[float, str]:
    """Return for how long steps of two groups overlapped at most, in ms, and which; 0.0 and "" when none did.

    `since_ns`: steps before that are judged already.
    """
    allowed = {one.pid: one.since_ns for one in awake}
    groups: dict[tuple[int, str], list[Rank]] = {}
    for rank in ranks:
        if rank.times_ns:
            groups.setdefault(rank.group, []).append(rank)
    begins = {group: min(rank.times_ns[0] for rank in members) for group, members in groups.items()}
    worst, text = 0.0, ""
    for older, members in groups.items():
        for newer, begin in begins.items():
            if begins[older] >= begin:
                continue
            for rank in members:
                new = rank.times_ns[bisect.bisect_left(rank.times_ns, max(begin, since_ns)) :]
                late = [t for t in new if not _waking(t, allowed.get(rank.pid))]
                if late and (late[-1] - begin) / 1e6 >= worst:
                    worst = (late[-1] - begin) / 1e6
                    text = f"rank {rank.rank} on {rank.node} of group {older} stepped {worst:.0f} ms into {newer}"
    return worst, text


def _waking(t_ns: int, since_ns: int | None) -> bool:
    return since_ns is not None and since_ns <= t_ns <= since_ns + WAKING_S * _NS


def pause_s(ranks: Iterable[Rank], begin_ns: int, end_ns: int) -> float:
    """Return the longest time within these bounds without a step of any rank, in seconds."""
    times = sorted(t for rank in ranks for t in rank.times_ns if begin_ns <= t <= end_ns)
    edges = [begin_ns, *times, end_ns]
    return max(later - earlier for earlier, later in itertools.pairwise(edges)) / _NS


def log_violations(rank: Rank, path: Path, *, cut: bool = False) -> list[Violation]:
    """Judge the log of one process; its file may be missing only if it took nothing.

    `cut`: its host has lost power since, and with it the end of what nobody syncs: ext4 may have its length already,
    and zeros in its place.
    """
    wanted = rank.log()
    have = path.read_bytes() if path.exists() else b""
    if cut and wanted.startswith(have.rstrip(b"\0")):
        return []
    rest = have[len(wanted) :]
    if have[: len(wanted)] == wanted and printed(len(rank.written), rank.pid).startswith(rest):
        return []
    same = _equal(have, wanted)
    text = f"{path.name} of rank {rank.rank} on {rank.node}, group {rank.group}: {len(wanted)} bytes written"
    return [Violation("log", f"{text}, {len(have)} in the file, the first {same} are equal")]


def _equal(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items from the first on are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _is_older(own: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tell whether a node's own end, if it has one, is of an earlier term than what all others have instead."""
    return not own or (
        bool(others) and max(record["term"] for record in own) < min(record["term"] for record in others)
    )


def journal_violations(journals: Mapping[str, bytes], *, all_there: bool = True) -> list[Violation]:
    """Judge the journals of all nodes, by name, after the end of the job; `all_there`: no node was out then."""
    found = []
    read: dict[str, list[Any]] = {}
    for node, data in journals.items():
        try:
            read[node] = [json.loads(text) for text in data.splitlines()]
        except ValueError as error:
            found.append(Violation("journal", f"{node}: a line is no JSON: {error}"))
            continue
        numbers = [record["seq"] for record in read[node]]
        if not data.endswith(b"\n") or numbers != list(range(1, len(numbers) + 1)):
            found.append(Violation("journal", f"{node}: {len(numbers)} records, not numbered from 1 without a gap"))
    # Of the newest coordinator, by its term.
    longest = max(read, key=lambda node: (read[node][-1]["term"] if read[node] else 0, len(read[node])), default="")
    for node, records in read.items():
        if records != read[longest]:
            place = _equal(records, read[longest])
            if not all_there and _is_older(records[place:], read[longest][place:]):
                continue
            lacks = [record["type"] for record in read[longest][place : place + 5]]
            text = f"{node} has {len(records)} records, {longest} {len(read[longest])}; from {place + 1} on they differ"
            found.append(Violation("journal", f"{text}: {longest} has {', '.join(lacks)} …"))
    return found


class StatusJudge:
    """Judges the status of one job from time to time; what is false when one judgement ends is so in the next."""

    def __init__(self) -> None:
        self._now = 0
        self._place = 0
        self._since: dict[int, int] = {}

    def until(
        self,
        documents: Sequence[Document],
        ranks: Sequence[Rank],
        end_ns: int,
        *,
        unseen: Sequence[tuple[int, int]] = (),
        stopped: Collection[int] = (),
    ) -> tuple[float, str]:
        """Return for how long the status was false about one process at most until then, in seconds, and how.

        `unseen` are the times (ns) in which the operator reached no host; `stopped` the processes that the case
        stopped.
        """
        worst, text = 0.0, ""
        if documents:
            self._now = max(self._now, documents[0].t_ns)
        while documents and self._now < end_ns:
            now = self._now
            while self._place + 1 < len(documents) and documents[self._place + 1].t_ns <= now:
                self._place += 1
            status = documents[self._place].status
            wrong = {} if any(begin <= now <= end for begin, end in unseen) else _wrong(_said(status), ranks, now)
            self._since = {pid: self._since.get(pid, now) for pid in wrong if pid not in stopped}
            for pid, begin in self._since.items():
                if (now - begin) / _NS > worst:
                    worst = (now - begin) / _NS
                    text = f"{wrong[pid]} (process {pid}); the state said {status.get('state')}"
            self._now += int(_LOOK_S * _NS)
        return worst, text


def _said(status: Mapping[str, Any]) -> set[int]:
    """Return the processes that a status calls alive."""
    if status.get("state") != "running":
        return set()
    ranks = [rank for node in status.get("nodes", ()) for rank in node["ranks"]]
    return {rank["pid"] for rank in ranks if rank["state"] in _LIVING and rank["pid"]}


def _wrong(said: set[int], ranks: Sequence[Rank], now: int) -> dict[int, str]:
    """Return the processes about which the status is false at that time, and how."""
    begin = now - int(_STEPPING_S * _NS)
    true = {rank.pid: rank for rank in ranks if _steps_between(rank.times_ns, begin, now)}
    silent = dict.fromkeys(said - set(true), "called alive, and makes no step")
    unknown = {
        pid: f"rank {true[pid].rank} on {true[pid].node} steps, and is not called alive" for pid in set(true) - said
    }
    return {**silent, **unknown}


def _steps_between(times_ns: Sequence[int], begin: int, end: int) -> bool:
    # Most processes are over, or have not begun.
    if not times_ns or times_ns[0] > end or times_ns[-1] < begin:
        return False
    return bisect.bisect_left(times_ns, begin) < bisect.bisect_right(times_ns, end)


def left_out(records: Sequence[Mapping[str, Any]], place: int, node_timeout: float) -> set[str]:
    """Return the nodes that the job leaves out for what they did before this place of the journal too.

    A node that is lost, or whose engine dies, three times in ten minutes is left out until the operator adds it, as
    documented. Where all of these are after `place`, one case alone was taken for several, and the node is not among
    these.
    """
    found = set()
    for record in records[place:]:
        node, reason = str(record.get("node")), str(record["detail"].get("reason") or "")
        needed = next((count for words, count in _LEFT_OUT.items() if words in reason), 0)
        if record["type"] in _OUT and needed:
            if _outages(records[place : record["seq"]], node, node_timeout) < needed:
                found.add(node)
        elif record["type"] == "node_added":
            found.discard(node)
    return found


def _outages(records: Sequence[Mapping[str, Any]], node: str, node_timeout: float) -> int:
    """Count what happened to a node; what follows within a node_timeout is the same."""
    count, last = 0, -math.inf
    for record in records:
        is_its = record["type"] == "node_lost" and record.get("node") == node
        if is_its or (record["type"] == "incident" and record["detail"].get("culprit_node") == node):
            now = datetime.fromisoformat(record["time"].replace("Z", "+00:00")).timestamp()
            count += abs(now - last) >= node_timeout
            last = now
    return count

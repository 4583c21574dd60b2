"""The agent's care for snapshots: it keeps what its ranks save, sends copies to other nodes, and puts one in place.

In: the job's patterns, the working directory, offers and questions of other agents, the coordinator's orders. Out: kept
snapshots here and on another node; before a group starts, the chosen snapshots in place.

Keeping and copying run in a thread of idle priority, and a copy at a limited rate: training comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent.agent.snapshot_copies import Changes, Notices, Reporter, SharedFiles, SnapshotCopies
from remote_agent.election.peers import PeerRefused, PeerUnreachable
from remote_agent.snapshots.choice import Skipped, Span, is_within, slot_of
from remote_agent.snapshots.rules import (
    SETTLE_NS,
    InPlace,
    Moment,
    is_complete,
    judge,
    shards_elsewhere,
    step_of,
)
from remote_agent.snapshots.scan import is_open_for_writing, matches, scan
from remote_agent.snapshots.store import Abandoned, KeptSnapshot, Store, remove_asides, set_aside
from remote_agent.wire import CallFailed, Problem, WireError
from remote_agent.wire.events import SNAPSHOT_LEFT_OUT, SNAPSHOT_NOT_KEPT, SNAPSHOT_UNNAMED

if TYPE_CHECKING:
    from remote_agent.agent.background import Background
    from remote_agent.base.paths import JobFiles
    from remote_agent.base.tasks import Tasks
    from remote_agent.coordinator.journal import Journal
    from remote_agent.election.election import PeerRequest
    from remote_agent.election.peers import Peers
    from remote_agent.logs import LogStore
    from remote_agent.tree.manifest import File
    from remote_agent.wire import JobSpec
    from remote_agent.wire.documents import OfferedSnapshot, PlacedAnswer, SnapshotEntry

log = logging.getLogger(__name__)

LOOK_S = 1.0
# If no snapshots are named, or nothing matches, files that ranks write are searched for this often and this deep.
UNNAMED_LOOK_S = 10.0
# The search takes at most this share of the time, as a work tree may have tens of thousands of files.
UNNAMED_SHARE = 0.01
UNNAMED = ("*", "*/*", "*/*/*")
# A file that was put in place gets its original time, by a clock offset that is never exact to the nanosecond.
SAME_NS = 1_000_000


class MemberView(Reporter, Protocol):
    """What the keeper asks its own node: `MemberLoop`."""

    @property
    def running(self) -> int | None: ...
    @property
    def shift_ns(self) -> int: ...


class SnapshotKeeper:
    """The snapshots of one job on this node."""

    def __init__(
        self,
        files: JobFiles,
        spec: JobSpec,
        workdir: str,
        background: Background,
        peers: Peers,
        logs: LogStore,
        journal: Journal,
    ) -> None:
        self._spec = spec
        self._base = Path(workdir)
        self._background = background
        self._logs = logs
        self._journal = journal
        root = files.root / "snapshots"
        self._store = Store(root, self._base, spec.snapshots, spec.snapshots_limit)
        self._changes, self._notices = Changes(), Notices()
        self._shared = SharedFiles(spec, self._base, background, peers)
        self.copies = SnapshotCopies(
            spec, root, self._store, self._changes, self._notices, background, peers, self._shift_ns
        )
        self._hurry = threading.Event()
        """Set while a group waits to be started: nothing is kept in the background."""
        self._known: dict[str, tuple[Mapping[str, Any], str | None]] = {}
        """For each path, the stamps of what was last kept or left out there, and its id."""
        self._aside: list[str] = []
        """What was hidden since the last report on it."""
        self._has_told_unnamed = False
        self._steps: deque[tuple[int, int]] = deque(maxlen=600)
        """Times at which a step was first seen in the ranks' output."""
        self._group_ns: int | None = None
        self._member: MemberView | None = None
        self.requests: dict[str, PeerRequest] = {**self._shared.requests, **self.copies.requests}

    def start(self, tasks: Tasks, member: MemberView) -> None:
        """Begin to keep what ranks save, and to look for snapshots that are not named."""
        self._member = member
        self._notices.start(member)
        self.copies.start(tasks)
        if self._spec.snapshots:
            # Steps are noted in a task of their own: the keeping thread may get no processor time for seconds.
            tasks.spawn(self._repeat(self._note_step, LOOK_S), "steps of snapshots")
            tasks.spawn(self._repeat(self._keep_new, LOOK_S), "snapshots")
            tasks.spawn(self._repeat(self.copies.send, LOOK_S), "copies of snapshots")
        if len(self._spec.nodes) > 1:
            tasks.spawn(self._repeat(self.look_for_unnamed, UNNAMED_LOOK_S, UNNAMED_SHARE), "unnamed snapshots")

    def close(self) -> None:
        """Keep nothing more; what is being kept is dropped."""
        self._hurry.set()

    def begin_group(self) -> None:
        """Note that a group is started here: what its ranks write is looked at."""
        self._hurry.clear()
        self._steps.clear()
        self.copies.begin_group()
        self._store.pin(())
        self._group_ns = time.time_ns()

    def end_group(self) -> None:
        """Note that ranks end: what they were writing may be torn."""
        self._group_ns = None

    def heads(self) -> list[SnapshotEntry]:
        """Return what this node keeps."""
        return [one.head() for one in self._store.kept]

    async def _repeat(self, work: Callable[[], Any], pause_s: float, share: float = 1.0) -> None:
        """Work until cancelled, with pauses of at least `pause_s`, for at most this share of the time."""
        took_s = 0.0
        while True:
            await asyncio.sleep(max(pause_s, took_s / share - took_s))
            begun = time.monotonic()
            try:
                await work()
            except Exception:
                # One bad file must not stop the handling of all others.
                log.exception("snapshots")
            took_s = time.monotonic() - begun

    def _shift_ns(self) -> int:
        return self._member.shift_ns if self._member is not None else 0

    # Keeping what ranks save

    async def _keep_new(self) -> None:
        if self._group_ns is None or self._member is None or self._member.running is None:
            return
        seen = await self._background.run(scan, self._base, self._spec.snapshots)
        for problem in seen.problems:
            self._notices.tell(SNAPSHOT_LEFT_OUT, problem)
        here = {snapshot.path for snapshot in seen.snapshots}
        self._known = {path: known for path, known in self._known.items() if path in here}
        for snapshot in seen.snapshots:
            if self._is_known(snapshot):
                continue
            if await self._background.run(self._may_be_kept, snapshot, self._moment()):
                is_kept = await self._keep(snapshot)
            else:
                is_kept = await self._gather(snapshot)
            if is_kept:
                await self._background.run(remove_asides, snapshot)

    async def _note_step(self) -> None:
        generation = self._member.running if self._member is not None else None
        if self._group_ns is None or generation is None:
            return
        steps = [seen["step"] for seen in self._logs.progress(generation).values() if seen["step"] is not None]
        if steps and (not self._steps or max(steps) != self._steps[-1][1]):
            self._steps.append((time.time_ns(), max(steps)))

    def _moment(self) -> Moment:
        records = self._journal.records
        first_ns = time.time_ns()
        if records:
            began = datetime.datetime.fromisoformat(records[0]["time"].rstrip("Z"))
            first_ns = int(began.replace(tzinfo=datetime.timezone.utc).timestamp() * 1e9) - self._shift_ns()
        return Moment(time.time_ns(), first_ns, self._group_ns)

    def _is_known(self, snapshot: InPlace) -> bool:
        """Return whether it was looked at as it is; its script may be removing it, one file after the other."""
        return bool(snapshot.files) and snapshot.files.items() <= self._known.get(snapshot.path, ({}, None))[0].items()

    @staticmethod
    def _may_be_kept(snapshot: InPlace, moment: Moment) -> bool:
        verdict = judge(snapshot)
        if not is_complete(snapshot, verdict, moment):
            return False
        places = [snapshot.place.parent / path for path in snapshot.files]
        return verdict.whole is True or snapshot.changed_ns < moment.first_ns or not is_open_for_writing(places)

    async def _keep(
        self, snapshot: InPlace, *, at_once: bool = False, elsewhere: Mapping[str, File] = MappingProxyType({})
    ) -> bool:
        """Keep a complete snapshot, unless all nodes see the same files; `at_once`: a group waits for it.

        `elsewhere`: its files that other nodes have sent.
        """
        try:
            if await self._shared.look(snapshot, ask_again=not at_once):
                self._known[snapshot.path] = snapshot.files, None
                return False
            own_step = step_of(snapshot)
            step = self._printed_step(snapshot.changed_ns) if own_step is None else own_step

            def keep() -> KeptSnapshot:
                stop = self._changes.abandon.is_set if at_once else self._hurry.is_set
                time_ns = snapshot.changed_ns + self._shift_ns()
                exact = own_step is not None
                return self._store.keep(snapshot, time_ns, step, exact=exact, stop=stop, elsewhere=elsewhere)

            kept = await self._changes.make(asyncio.to_thread if at_once else self._background.run, keep)
        except (Abandoned, FileNotFoundError):
            # The file changed, or its script removed it; the next look sees the result.
            return False
        except (OSError, Problem) as error:
            self._known[snapshot.path] = snapshot.files, None
            self._notices.tell(SNAPSHOT_NOT_KEPT, f"{snapshot.path} is not kept: {error}", slot_of(snapshot.path))
            return False
        # If its files come from several nodes, the files in place are not the kept snapshot.
        self._known[snapshot.path] = snapshot.files, None if elsewhere else kept.id
        self.copies.note_own(kept.id)
        self._notices.withdraw(SNAPSHOT_NOT_KEPT, slot_of(snapshot.path))
        return True

    async def _gather(self, snapshot: InPlace, *, at_once: bool = False) -> bool:
        """Keep a DCP snapshot whose shards lie on several nodes' own disks, once they are here; returns whether."""
        names = await asyncio.to_thread(shards_elsewhere, snapshot)
        is_settled = at_once or time.time_ns() - snapshot.changed_ns >= SETTLE_NS
        if not names or not is_settled or snapshot.changed_ns < self._moment().first_ns:
            return False
        elsewhere: dict[str, File] = {}
        question = {"path": snapshot.path, "names": sorted(names), "time_ns": snapshot.changed_ns + self._shift_ns()}
        try:
            for node in self._background.others():
                with contextlib.suppress(PeerRefused, PeerUnreachable, WireError, CallFailed, asyncio.TimeoutError):
                    elsewhere.update(await self.copies.shards_of(node, snapshot, question, slow=not at_once))
        except (Abandoned, OSError, Problem) as error:
            self._notices.tell(SNAPSHOT_NOT_KEPT, f"{snapshot.path} is not kept: {error}", slot_of(snapshot.path))
            self._known[snapshot.path] = snapshot.files, None
            return False
        if {path.rpartition("/")[2] for path in elsewhere} != names:
            # Its save continues, or one of its nodes is lost; then the previous snapshot counts.
            return False
        return await self._keep(snapshot, at_once=at_once, elsewhere=elsewhere)

    def _printed_step(self, time_ns: int) -> int | None:
        """Return the step that ranks had printed by a time; a step is seen up to LOOK_S after it was printed."""
        by_ns = time_ns + int(LOOK_S * 1e9)
        return next((step for seen_ns, step in reversed(self._steps) if seen_ns <= by_ns), None)

    # Other nodes

    # Before a group starts

    async def hold(self, keep: Iterable[str] = ()) -> list[SnapshotEntry]:
        """Return all that this node keeps, with what was saved last, and hide what is torn; no group runs here.

        `keep`: the ids of those from which the next group resumes, if it is known already.
        """
        self._store.pin(keep)
        self._hurry.set()
        self._changes.abandon.clear()
        self._group_ns = None
        try:
            await self._changes.make(asyncio.to_thread, self._store.check)
            for snapshot in (await asyncio.to_thread(scan, self._base, self._spec.snapshots)).snapshots:
                if not self._is_known(snapshot):
                    await self._hold(snapshot, self._moment())
        except OSError as error:
            # The snapshots kept so far count; whether the disk has room is seen when a snapshot is put in place.
            log.warning("snapshots: %s", error)
        return self.heads()

    async def _hold(self, snapshot: InPlace, moment: Moment) -> None:
        if await asyncio.to_thread(self._may_be_kept, snapshot, moment):
            await self._keep(snapshot, at_once=True)
        elif await self._gather(snapshot, at_once=True):
            return
        elif await asyncio.to_thread(self._is_left_torn, snapshot, moment):
            self._aside.append(f"{snapshot.path} -> {await asyncio.to_thread(set_aside, snapshot)}")

    def _is_left_torn(self, snapshot: InPlace, moment: Moment) -> bool:
        """Return whether ranks of this job have ended in the middle of it, and left what their script cannot read."""
        try:
            changed_ns = snapshot.changed_ns or os.lstat(snapshot.place).st_mtime_ns
            is_shared = self._shared.known(snapshot)
        except OSError:
            return False
        places = [snapshot.place.parent / path for path in snapshot.files]
        is_ours = changed_ns >= moment.first_ns and not is_shared
        return is_ours and snapshot.is_torn() and not is_open_for_writing(places)

    async def restore(self, chosen: Sequence[OfferedSnapshot], skipped: Sequence[Span] = ()) -> PlacedAnswer:
        """Put the chosen snapshots in place, and hide newer ones; returns the report, with `problem` where it fails.

        `skipped`: between which times of the coordinator's clock snapshots do not count, also those of other series.
        """
        self._changes.abandon.clear()
        began = time.monotonic()
        ids, aside, self._aside = [str(one["id"]) for one in chosen], self._aside, []
        report: PlacedAnswer = {"ids": ids, "bytes": 0, "placed": {}, "aside": aside}
        self._store.skip(Skipped(tuple((begin, end) for begin, end in skipped), frozenset(ids)))
        try:
            with self.copies.none_accepted():
                for one in chosen:
                    await self._restore(one, report)
                await self._hide_skipped({slot_of(str(one["path"])) for one in chosen}, skipped, report)
        except (OSError, Abandoned) as error:
            report["problem"] = str(error) or "it changed meanwhile"
        except Problem as problem:
            report["problem"] = problem.message
        return {**report, "seconds": round(time.monotonic() - began, 3)}

    async def _restore(self, chosen: OfferedSnapshot, report: PlacedAnswer) -> None:
        path, time_ns = str(chosen["path"]), int(chosen["time_ns"])
        changed_ns = time_ns - self._shift_ns()
        seen = await asyncio.to_thread(scan, self._base, self._spec.snapshots)
        series = [candidate for candidate in seen.snapshots if slot_of(candidate.path) == slot_of(path)]
        current = next((candidate for candidate in series if candidate.path == path), None)
        stays = current is not None and await asyncio.to_thread(self._is_the_same, current, chosen)
        obtained = None if stays else await self.copies.obtain(chosen)
        for candidate in series:
            # The snapshot that is replaced is set aside too: it may be complete although it could not be kept.
            if candidate.changed_ns > changed_ns + SAME_NS and not (stays and candidate is current):
                report["aside"].append(f"{candidate.path} -> {await asyncio.to_thread(set_aside, candidate)}")
        if obtained is not None:
            snapshot, source = obtained
            stop = self._changes.abandon.is_set
            placed = await self._changes.make(asyncio.to_thread, self._store.put_in_place, snapshot, changed_ns, stop)
            await self._changes.make(asyncio.to_thread, self._store.add, snapshot)
            self._known[path] = placed.files, snapshot.id
            report["placed"][snapshot.id] = source
            report["bytes"] += snapshot.size if source else 0

    async def _hide_skipped(self, restored: set[str], skipped: Sequence[Span], report: PlacedAnswer) -> None:
        """Hide what no longer counts of the series from which nothing was restored: no node has an older version."""
        if not skipped:
            return
        for candidate in (await asyncio.to_thread(scan, self._base, self._spec.snapshots)).snapshots:
            time_ns = candidate.changed_ns + self._shift_ns() - SAME_NS
            is_shared = self._shared.known(candidate)
            if slot_of(candidate.path) not in restored and is_within(skipped, time_ns) and not is_shared:
                report["aside"].append(f"{candidate.path} -> {await asyncio.to_thread(set_aside, candidate)}")

    def _is_the_same(self, current: InPlace, chosen: OfferedSnapshot) -> bool:
        """Return whether a rank resumes from the same step with what lies in place."""
        files, name = self._known.get(current.path, ({}, None))
        if self._is_known(current):
            if current.files != files:
                # The script was removing it.
                return False
            if name == chosen["id"]:
                return True
        is_named = bool(chosen.get("exact")) and step_of(current) == chosen.get("step")
        return is_named and judge(current).whole is True

    # Jobs that name no snapshots

    async def look_for_unnamed(self) -> None:
        """Report once that ranks write a snapshot which no other node has, where nothing that is named is there."""
        group_ns, named = self._group_ns, self._spec.snapshots
        if group_ns is None or self._has_told_unnamed or (named and (self._store.kept or self._known)):
            return
        wrong = f"nothing matches snapshots = {json.dumps(list(named))} so far, and " if named else ""
        for snapshot in (await self._background.run(scan, self._base, UNNAMED)).snapshots:
            is_named = any(matches(pattern, snapshot.path) for pattern in named)
            if snapshot.changed_ns < group_ns or self._is_known(snapshot) or is_named:
                continue
            self._known[snapshot.path] = snapshot.files, None
            verdict = await self._background.run(judge, snapshot)
            if verdict.form and verdict.whole and not await self._shared.look(snapshot):
                name = re.sub(r"\d+", "*", snapshot.path)
                self._has_told_unnamed = True
                self._notices.tell(
                    SNAPSHOT_UNNAMED,
                    f"{wrong}{snapshot.path} is a snapshot that only this node's disk has; --snapshots '{name}', or "
                    f'snapshots = ["{name}"] in [job], keeps copies of it on other nodes',
                )
                return

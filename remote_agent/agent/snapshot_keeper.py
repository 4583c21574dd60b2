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
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from remote_agent.election.peers import PeerRefused, PeerUnreachable
from remote_agent.snapshots.choice import Skipped, Span, is_within, slot_of
from remote_agent.snapshots.rules import (
    CLOCKS_NS,
    SETTLE_NS,
    InPlace,
    Moment,
    is_complete,
    is_shard,
    judge,
    shards_elsewhere,
    stamp_of,
    step_of,
)
from remote_agent.snapshots.scan import is_open_for_writing, matches, scan
from remote_agent.snapshots.store import Abandoned, Content, KeptSnapshot, Store, content_at, remove_asides, set_aside
from remote_agent.tree.manifest import File, Manifest, pack, unpack
from remote_agent.wire import Answer, Args, CallFailed, Channel, Items, Problem, WireError
from remote_agent.wire.channel import bodies
from remote_agent.wire.events import SNAPSHOT_LEFT_OUT, SNAPSHOT_NOT_KEPT, SNAPSHOT_UNNAMED

if TYPE_CHECKING:
    from remote_agent.agent.background import Background
    from remote_agent.base.paths import JobFiles
    from remote_agent.base.tasks import Tasks
    from remote_agent.coordinator.journal import Journal
    from remote_agent.election.election import PeerRequest
    from remote_agent.election.peers import Peers
    from remote_agent.logs import LogStore
    from remote_agent.wire import JobSpec
    from remote_agent.wire.documents import OfferedSnapshot, PlacedAnswer, SnapshotEntry

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0
# If no snapshots are named, or nothing matches: how often, and how deep, to look for files that ranks write.
UNNAMED_LOOK_S = 10.0
# At most this share of the time: a work tree may have tens of thousands of files.
UNNAMED_SHARE = 0.01
UNNAMED = ("*", "*/*", "*/*/*")
# How many times the other nodes are asked whether they see the same files, while they do not.
SHARED_ASKS = 3
# How many other nodes get a copy.
COPIES = 1
# Less than a tenth of a 10-gigabit link, more than a snapshot of 2 GiB every 30 s.
COPY_BYTES_S = 100e6
# The size of a piece: asyncio copies the unsent rest of a larger one again and again.
SENT_BYTES = 256 * 1024
HEAD_TIMEOUT_S = 10.0
# A node copies its shards before it lists them.
SHARDS_TIMEOUT_S = 60.0
# A link that sends nothing for this long is given up.
PIECE_TIMEOUT_S = 30.0
# A file that was put in place gets its original time, by a clock offset that is never exact to the nanosecond.
SAME_NS = 1_000_000


class MemberView(Protocol):
    """What the keeper asks its own node: `MemberLoop`."""

    @property
    def running(self) -> int | None: ...
    @property
    def shift_ns(self) -> int: ...
    def report(self, op: str, args: Args) -> None: ...


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
        self._peers = peers
        self._logs = logs
        self._journal = journal
        self._root = files.root / "snapshots"
        self._store = Store(self._root, self._base, spec.snapshots, spec.snapshots_limit)
        self._lock = asyncio.Lock()
        """Held while what is kept changes."""
        self._taking = asyncio.Lock()
        self._is_restoring = False
        self._hurry = threading.Event()
        """Set while a group waits to be started: nothing is kept in the background."""
        self._abandon = threading.Event()
        """Set when the group is no longer to be started."""
        self._known: dict[str, tuple[Mapping[str, Any], str | None]] = {}
        """By path: the stamps of what was last kept or left out there, and its id."""
        self._own: set[str] = set()
        """Kept snapshots that ranks of this node have written: no other node has them unless this one has sent them."""
        self._copied: set[tuple[str, int]] = set()
        """Kept snapshots that enough nodes of this group have."""
        self._aside: list[str] = []
        """What was hidden since the last report on it."""
        self._shared: dict[tuple[int, str], bool] = {}
        """By device and pattern: whether the other nodes see the same files there."""
        self._asked: Counter[tuple[int, str]] = Counter()
        """By device and pattern: how often they were asked that."""
        self._has_told_unnamed = False
        self._steps: deque[tuple[int, int]] = deque(maxlen=600)
        """Times at which a step was first seen in the ranks' output."""
        self._group_ns: int | None = None
        self._arriving: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, str] = {}
        self._noticed: set[tuple[str, str]] = set()
        """Warnings by their kind and what they are about, until that is well again."""
        self._free_at = 0.0
        self._member: MemberView | None = None
        self._tasks: Tasks | None = None
        self.requests: dict[str, PeerRequest] = {
            "snapshot_sees": self._on_sees,
            "snapshot_offer": self._on_offer,
            "snapshot_head": self._on_head,
            "snapshot_read": self._on_read,
            "snapshot_shards": self._on_shards,
        }

    def start(self, tasks: Tasks, member: MemberView) -> None:
        """Begin to keep what ranks save, and to look for snapshots that are not named."""
        self._tasks, self._member = tasks, member
        if self._spec.snapshots:
            # Apart from the keeping, whose thread may get no processor time for seconds.
            tasks.spawn(self._repeat(self._note_step, LOOK_S), "steps of snapshots")
            tasks.spawn(self._repeat(self._keep_new, LOOK_S), "snapshots")
            tasks.spawn(self._repeat(self._send_copies, LOOK_S), "copies of snapshots")
        if len(self._spec.nodes) > 1:
            tasks.spawn(self._repeat(self.look_for_unnamed, UNNAMED_LOOK_S, UNNAMED_SHARE), "unnamed snapshots")

    def close(self) -> None:
        """Keep nothing more; what is being kept is dropped."""
        self._hurry.set()

    def begin_group(self) -> None:
        """Note that a group is started here: what its ranks write is looked at."""
        self._hurry.clear()
        self._steps.clear()
        # A node with a copy may have been lost.
        self._copied.clear()
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

    async def _locked(self, run: Callable[..., Any], work: Callable[..., T], *args: Any) -> T:
        """Change what is kept, one change at a time and each to its end; `run`: in which thread."""
        async with self._lock:
            doing = asyncio.ensure_future(run(work, *args))
            try:
                return await asyncio.shield(doing)
            except asyncio.CancelledError:
                self._abandon.set()
                await asyncio.wait({doing})
                raise

    def _notice(self, kind: str, message: str, about: str = "") -> None:
        """Have the coordinator write a warning to the journal, once for each thing that it is about."""
        if self._member is not None and (kind, about or message) not in self._noticed:
            self._noticed.add((kind, about or message))
            self._member.report("notice", {"kind": kind, "message": message})

    # Keeping what ranks save

    async def _keep_new(self) -> None:
        if self._group_ns is None or self._member is None or self._member.running is None:
            return
        seen = await self._background.run(scan, self._base, self._spec.snapshots)
        for problem in seen.problems:
            self._notice(SNAPSHOT_LEFT_OUT, problem)
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
        """Whether it was looked at as it is; its script may be removing it, one file after the other."""
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
            if await self._is_shared(snapshot, ask_again=not at_once):
                self._known[snapshot.path] = snapshot.files, None
                return False
            own_step = step_of(snapshot)
            step = self._printed_step(snapshot.changed_ns) if own_step is None else own_step

            def keep() -> KeptSnapshot:
                stop = self._abandon.is_set if at_once else self._hurry.is_set
                time_ns = snapshot.changed_ns + self._shift_ns()
                exact = own_step is not None
                return self._store.keep(snapshot, time_ns, step, exact=exact, stop=stop, elsewhere=elsewhere)

            kept = await self._locked(asyncio.to_thread if at_once else self._background.run, keep)
        except (Abandoned, FileNotFoundError):
            # It changed, or its script removed it: the next look sees what is there then.
            return False
        except (OSError, Problem) as error:
            self._known[snapshot.path] = snapshot.files, None
            self._notice(SNAPSHOT_NOT_KEPT, f"{snapshot.path} is not kept: {error}", slot_of(snapshot.path))
            return False
        # If its files come from several nodes, the files in place are not the kept snapshot.
        self._known[snapshot.path] = snapshot.files, None if elsewhere else kept.id
        self._own = {kept.id, *self._own} & {one.id for one in self._store.kept}
        self._noticed.discard((SNAPSHOT_NOT_KEPT, slot_of(snapshot.path)))
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
                    elsewhere.update(await self._shards_of(node, snapshot, question, slow=not at_once))
        except (Abandoned, OSError, Problem) as error:
            self._notice(SNAPSHOT_NOT_KEPT, f"{snapshot.path} is not kept: {error}", slot_of(snapshot.path))
            self._known[snapshot.path] = snapshot.files, None
            return False
        if {path.rpartition("/")[2] for path in elsewhere} != names:
            # Its save continues, or one of its nodes is lost: the one before counts.
            return False
        return await self._keep(snapshot, at_once=at_once, elsewhere=elsewhere)

    async def _shards_of(
        self, node: str, snapshot: InPlace, question: dict[str, Any], *, slow: bool
    ) -> dict[str, File]:
        """Bring the files of a snapshot that another node has; raises what `_pull` raises."""
        async with self._background.connected(node) as channel:
            answer = await channel.call("snapshot_shards", question, timeout=SHARDS_TIMEOUT_S)
            files = unpack(answer.body).files
            asked = {f"{snapshot.place.name}/{name}" for name in question["names"]}
            if not set(files) <= asked:
                raise Problem("bad_snapshot", f"{node} sent files that {snapshot.path} does not name")
            work = self._background.run if slow else asyncio.to_thread
            missing = await self._locked(work, self._store.expect_shards, snapshot.path, files)
            await self._fetch(node, missing, slow=slow)
        return files

    async def _on_shards(self, node: str, channel: Channel | None, args: Args) -> Answer:
        names = [str(name) for name in args["names"] if is_shard(str(name))]
        latest_ns = int(args["time_ns"]) - self._shift_ns() + CLOCKS_NS
        take = self._store.take_shards
        files = await self._locked(asyncio.to_thread, take, str(args["path"]), names, latest_ns, self._abandon.is_set)
        return Answer({}, pack(Manifest(files, {}, {})))

    def _printed_step(self, time_ns: int) -> int | None:
        """Return the step that ranks had printed by a time; a step is seen up to LOOK_S after it was printed."""
        by_ns = time_ns + int(LOOK_S * 1e9)
        return next((step for seen_ns, step in reversed(self._steps) if seen_ns <= by_ns), None)

    # Other nodes

    async def _is_shared(self, snapshot: InPlace, *, ask_again: bool = True) -> bool:
        """Whether the other nodes see the same files: then a copy of them saves nothing. Raises OSError."""
        where = self._where(snapshot)
        # A node may see a new file of a shared file system some seconds late; one that is lost delays each answer.
        is_open = ask_again and not self._shared.get(where) and self._asked[where] < SHARED_ASKS
        if where not in self._shared or is_open:
            self._asked[where] += 1
            question = {"path": snapshot.path, "files": {path: list(stamp) for path, stamp in snapshot.files.items()}}
            asking = [self._peers.ask(name, "snapshot_sees", question) for name in self._background.others()]
            answers = [bool(answer.get("sees")) for answer in await asyncio.gather(*asking) if answer]
            if not answers:
                return False
            self._shared[where] = all(answers)
        return self._shared[where]

    def _where(self, snapshot: InPlace) -> tuple[int, str]:
        """Return the device on which a snapshot lies, and its pattern; raises OSError.

        Of one file system, one directory may be shared and another one each node's own.
        """
        pattern = next((one for one in self._spec.snapshots if matches(one, snapshot.path)), "")
        return os.stat(snapshot.place.parent).st_dev, pattern

    async def _on_sees(self, node: str, channel: Channel | None, args: Args) -> Answer:
        parent = (self._base / str(args["path"])).parent

        def sees() -> bool:
            try:
                return all(list(stamp_of(os.lstat(parent / path))) == stamp for path, stamp in args["files"].items())
            except OSError:
                return False

        return Answer({"sees": await asyncio.to_thread(sees)})

    async def _send_copies(self) -> None:
        """Offer the newest snapshots to other nodes until enough have them."""
        newest = {one.slot: one for one in self._store.kept}
        for one in newest.values():
            # What is saved again, with the same content, counts from then on.
            saved = one.id, one.time_ns
            if saved not in self._copied and await self._offer(*saved):
                self._copied.add(saved)

    async def _offer(self, name: str, time_ns: int) -> bool:
        """Return whether enough nodes have it; nodes that are still fetching it are asked again later."""
        # What came from another node, or was kept before this agent was started, may have its copies already.
        if name not in self._own and await self._count_copies(name, time_ns, take=False) >= COPIES:
            return True
        return await self._count_copies(name, time_ns, take=True) >= COPIES

    async def _count_copies(self, name: str, time_ns: int, *, take: bool) -> int:
        """Return how many other nodes have a snapshot; `take`: those that lack it fetch it, until enough do."""
        having = arriving = 0
        for node in self._background.others():
            if having + arriving >= COPIES:
                break
            answer = await self._peers.ask(node, "snapshot_offer", {"id": name, "time_ns": time_ns, "take": take})
            having += bool(answer and answer.get("has"))
            arriving += bool(answer and answer.get("arrives"))
        return having

    async def _on_offer(self, node: str, channel: Channel | None, args: Args) -> Answer:
        name = str(args["id"])
        if any(one.id == name and one.time_ns >= int(args.get("time_ns", 0)) for one in self._store.kept):
            return Answer({"has": True})
        wanted = bool(self._spec.snapshots and args.get("take", True))
        if wanted and self._taking.locked() and name not in self._arriving:
            # One at a time: meanwhile another node may be free.
            return Answer({"refused": ""})
        if not wanted or name in self._refused or self._tasks is None or self._is_restoring:
            return Answer({"refused": self._refused.get(name, "")})
        if name not in self._arriving:
            self._arriving[name] = self._tasks.spawn(self._take(node, name), f"snapshot {name}")
        return Answer({"arrives": True})

    async def _take(self, node: str, name: str) -> None:
        try:
            # One at a time: two snapshots may share a content, and a content arrives once.
            async with self._taking:
                snapshot = await self._pull(node, name, slow=True)
                await self._locked(self._background.run, self._store.add, snapshot)
            self._noticed.discard((SNAPSHOT_NOT_KEPT, node))
        except (CallFailed, PeerRefused, PeerUnreachable, WireError, asyncio.TimeoutError, Abandoned) as error:
            # It is offered again and continues where it was cut, unless its node now offers newer ones.
            log.info("snapshot %s from %s: %s", name, node, error)
        except (OSError, Problem) as error:
            self._refused[name] = str(error)
            self._notice(SNAPSHOT_NOT_KEPT, f"a copy of a snapshot of {node} is not kept here: {error}", node)
            await self._locked(self._background.run, self._store.give_up, name)
        finally:
            self._arriving.pop(name, None)

    async def _pull(self, node: str, name: str, *, slow: bool) -> KeptSnapshot:
        """Bring a snapshot from another node; raises Problem, OSError, and what a connection raises."""
        work = self._background.run if slow else asyncio.to_thread
        async with self._background.connected(node) as channel:
            answer = await channel.call("snapshot_head", {"id": name}, timeout=HEAD_TIMEOUT_S)
            snapshot = KeptSnapshot.read(answer.data, answer.body)
            self._store.check_place(snapshot)
            await self._locked(work, self._store.make_room, snapshot.slot, snapshot.size)
            missing = await self._locked(work, self._store.expect, snapshot)
        await self._fetch(node, missing, slow=slow)
        return snapshot

    async def _fetch(self, node: str, missing: Mapping[str, tuple[int, int]], *, slow: bool) -> None:
        """Bring contents; `missing`: size and the bytes that are here of each. Raises what `_pull` raises."""
        run = self._background.run if slow else asyncio.to_thread
        for sha, (_, here) in missing.items():
            opened: list[socket.socket] = []
            receiving = asyncio.ensure_future(run(self._receive, node, sha, here, slow, opened))
            try:
                await asyncio.shield(receiving)
            except asyncio.CancelledError:
                self._abandon.set()
                for sock in opened:
                    # The thread may be waiting for a host without power.
                    with contextlib.suppress(OSError):
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)
                await asyncio.wait({receiving})
                raise

    def _receive(self, node: str, sha: str, here: int, slow: bool, opened: list[socket.socket]) -> None:
        """Bring one content over a connection of this thread's own, which `opened` gets."""
        with self._peers.open(node, PIECE_TIMEOUT_S) as sock:
            opened.append(sock)
            if self._abandon.is_set():
                raise Abandoned
            pieces = bodies(sock, "snapshot_read", {"sha": sha, "offset": here, "slow": slow})
            self._store.receive(sha, here, pieces, self._abandon.is_set)

    async def _on_head(self, node: str, channel: Channel | None, args: Args) -> Answer:
        return Answer(*self._store.get(str(args["id"])).described())

    async def _on_read(self, node: str, channel: Channel | None, args: Args) -> Items:
        return self._read(content_at(self._root, str(args["sha"])), int(args["offset"]), bool(args["slow"]))

    async def _read(self, path: Path, offset: int, slow: bool) -> Items:
        work = self._background.run if slow else asyncio.to_thread
        content = await work(Content, path)
        while piece := await work(content.read, SENT_BYTES, offset):
            if slow:
                await self._wait_for_rate(len(piece))
            yield Answer({}, piece)
            offset += len(piece)

    async def _wait_for_rate(self, size: int) -> None:
        """Wait until this many bytes may leave this node."""
        now = time.monotonic()
        begin = max(now, self._free_at)
        self._free_at = begin + size / COPY_BYTES_S
        await asyncio.sleep(begin - now)

    # Before a group starts

    async def hold(self, keep: Iterable[str] = ()) -> list[SnapshotEntry]:
        """Return all that this node keeps, with what was saved last, and hide what is torn; no group runs here.

        `keep`: the ids of those from which the next group resumes, if it is known already.
        """
        self._store.pin(keep)
        self._hurry.set()
        self._abandon.clear()
        self._group_ns = None
        try:
            await self._locked(asyncio.to_thread, self._store.check)
            for snapshot in (await asyncio.to_thread(scan, self._base, self._spec.snapshots)).snapshots:
                if not self._is_known(snapshot):
                    await self._hold(snapshot, self._moment())
        except OSError as error:
            # What is kept so far counts; whether the disk takes more is seen when a snapshot is put in place.
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
        """Whether ranks of this job have ended in the middle of it, and left what their script cannot read."""
        try:
            changed_ns = snapshot.changed_ns or os.lstat(snapshot.place).st_mtime_ns
            is_shared = self._shared.get(self._where(snapshot), False)
        except OSError:
            return False
        places = [snapshot.place.parent / path for path in snapshot.files]
        is_ours = changed_ns >= moment.first_ns and not is_shared
        return is_ours and snapshot.is_torn() and not is_open_for_writing(places)

    async def restore(self, chosen: Sequence[OfferedSnapshot], skipped: Sequence[Span] = ()) -> PlacedAnswer:
        """Put the chosen snapshots in place, and hide newer ones; returns the report, with `problem` where it fails.

        `skipped`: between which times of the coordinator's clock snapshots do not count, also those of other series.
        """
        self._abandon.clear()
        began = time.monotonic()
        ids, aside, self._aside = [str(one["id"]) for one in chosen], self._aside, []
        report: PlacedAnswer = {"ids": ids, "bytes": 0, "placed": {}, "aside": aside}
        # An offer of the same snapshot would fetch it a second time into the same file.
        self._is_restoring = True
        self._store.skip(Skipped(tuple((begin, end) for begin, end in skipped), frozenset(ids)))
        try:
            for one in chosen:
                await self._restore(one, report)
            await self._hide_skipped({slot_of(str(one["path"])) for one in chosen}, skipped, report)
        except (OSError, Abandoned) as error:
            report["problem"] = str(error) or "it changed meanwhile"
        except Problem as problem:
            report["problem"] = problem.message
        finally:
            self._is_restoring = False
        return {**report, "seconds": round(time.monotonic() - began, 3)}

    async def _restore(self, chosen: OfferedSnapshot, report: PlacedAnswer) -> None:
        path, time_ns = str(chosen["path"]), int(chosen["time_ns"])
        changed_ns = time_ns - self._shift_ns()
        seen = await asyncio.to_thread(scan, self._base, self._spec.snapshots)
        series = [candidate for candidate in seen.snapshots if slot_of(candidate.path) == slot_of(path)]
        current = next((candidate for candidate in series if candidate.path == path), None)
        stays = current is not None and await asyncio.to_thread(self._is_the_same, current, chosen)
        obtained = None if stays else await self._obtain(chosen)
        for candidate in series:
            # Also the one whose place is taken: it may be complete, and could not be kept.
            if candidate.changed_ns > changed_ns + SAME_NS and not (stays and candidate is current):
                report["aside"].append(f"{candidate.path} -> {await asyncio.to_thread(set_aside, candidate)}")
        if obtained is not None:
            snapshot, source = obtained
            stop = self._abandon.is_set
            placed = await self._locked(asyncio.to_thread, self._store.put_in_place, snapshot, changed_ns, stop)
            await self._locked(asyncio.to_thread, self._store.add, snapshot)
            self._known[path] = placed.files, snapshot.id
            report["placed"][snapshot.id] = source
            report["bytes"] += snapshot.size if source else 0

    async def _hide_skipped(self, restored: set[str], skipped: Sequence[Span], report: PlacedAnswer) -> None:
        """Hide what no longer counts of the series from which nothing was restored: no node has an older version."""
        if not skipped:
            return
        for candidate in (await asyncio.to_thread(scan, self._base, self._spec.snapshots)).snapshots:
            time_ns = candidate.changed_ns + self._shift_ns() - SAME_NS
            is_shared = self._shared.get(self._where(candidate), False)
            if slot_of(candidate.path) not in restored and is_within(skipped, time_ns) and not is_shared:
                report["aside"].append(f"{candidate.path} -> {await asyncio.to_thread(set_aside, candidate)}")

    def _is_the_same(self, current: InPlace, chosen: OfferedSnapshot) -> bool:
        """Whether a rank resumes from the same step with what lies in place."""
        files, name = self._known.get(current.path, ({}, None))
        if self._is_known(current):
            if current.files != files:
                # Its script was removing it.
                return False
            if name == chosen["id"]:
                return True
        is_named = bool(chosen.get("exact")) and step_of(current) == chosen.get("step")
        return is_named and judge(current).whole is True

    async def _obtain(self, chosen: OfferedSnapshot) -> tuple[KeptSnapshot, str | None]:
        """Return a snapshot whose contents are here, and from which node they came; raises Problem."""
        name = str(chosen["id"])
        arriving = list(self._arriving.values())
        for task in arriving:
            task.cancel()
        await asyncio.gather(*arriving, return_exceptions=True)
        self._abandon.clear()
        with contextlib.suppress(Problem):
            return self._store.get(name), None
        reasons = []
        for holder in chosen["holders"]:
            try:
                return await self._pull(str(holder), name, slow=False), str(holder)
            except (PeerRefused, PeerUnreachable, WireError, Problem, asyncio.TimeoutError, KeyError) as error:
                reasons.append(f"{holder}: {error}")
        raise Problem("no_snapshot", f"no node sent {chosen['path']}: {'; '.join(reasons)}")

    # Where no snapshots are named

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
            if verdict.form and verdict.whole and not await self._is_shared(snapshot):
                name = re.sub(r"\d+", "*", snapshot.path)
                self._has_told_unnamed = True
                self._notice(
                    SNAPSHOT_UNNAMED,
                    f"{wrong}{snapshot.path} is a snapshot that only this node's disk has; --snapshots '{name}', or "
                    f'snapshots = ["{name}"] in [job], keeps copies of it on other nodes',
                )
                return

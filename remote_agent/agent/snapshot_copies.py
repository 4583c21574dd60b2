"""Snapshots on their way between nodes: what is offered, fetched and handed out, and which files all nodes see.

In: what is kept here, questions of other agents. Out: copies on other nodes, at a limited rate; contents from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from remote_agent.base.tasks import to_the_end
from remote_agent.election.peers import PeerRefused, PeerUnreachable
from remote_agent.snapshots.rules import CLOCKS_NS, InPlace, is_shard, stamp_of
from remote_agent.snapshots.scan import matches
from remote_agent.snapshots.store import Abandoned, Content, KeptSnapshot, Store, content_at
from remote_agent.tree.manifest import File, Manifest, pack, unpack
from remote_agent.wire import Answer, Args, CallFailed, Channel, Items, Problem, WireError
from remote_agent.wire.channel import bodies
from remote_agent.wire.events import SNAPSHOT_NOT_KEPT

if TYPE_CHECKING:
    from remote_agent.agent.background import Background
    from remote_agent.base.tasks import Tasks
    from remote_agent.election.election import PeerRequest
    from remote_agent.election.peers import Peers
    from remote_agent.wire import JobSpec
    from remote_agent.wire.documents import OfferedSnapshot

log = logging.getLogger(__name__)

T = TypeVar("T")

# While other nodes do not see the same files, they are asked this many times.
SHARED_ASKS = 3
COPIES = 1
"""The number of other nodes that get a copy."""
# This is less than a tenth of a 10-gigabit link, and more than a snapshot of 2 GiB every 30 s needs.
COPY_BYTES_S = 100e6
# Larger pieces are slow: asyncio copies their unsent rest again and again.
SENT_BYTES = 256 * 1024
HEAD_TIMEOUT_S = 10.0
# The deadline is long because a node copies its shards before it lists them.
SHARDS_TIMEOUT_S = 60.0
# A link that sends nothing for this long is given up.
PIECE_TIMEOUT_S = 30.0
# So many warnings, and refused snapshots, are remembered; what is forgotten may be said, or tried, once more.
MOST_TOLD = 256


class Reporter(Protocol):
    """What reports to the coordinator: `MemberLoop`."""

    def report(self, op: str, args: Args) -> None: ...


class Changes:
    """Changes of what is kept: one at a time, and each to its end."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.abandon = threading.Event()
        """Set when the group that a change is for is no longer to be started."""

    async def make(self, run: Callable[..., Any], work: Callable[..., T], *args: Any) -> T:
        """Return what `work` returns; `run`: in which thread."""
        async with self._lock:
            return await to_the_end(run(work, *args), self.abandon.set)


class Notices:
    """Warnings for the journal, each told once until what it is about is well again."""

    def __init__(self) -> None:
        self._member: Reporter | None = None
        self._told: set[tuple[str, str]] = set()

    def start(self, member: Reporter) -> None:
        """Begin: `member` has the coordinator write the warnings."""
        self._member = member

    def tell(self, kind: str, message: str, about: str = "") -> None:
        """Have a warning written, unless that is done."""
        if self._member is not None and (kind, about or message) not in self._told:
            if len(self._told) >= MOST_TOLD:
                self._told.clear()
            self._told.add((kind, about or message))
            self._member.report("notice", {"kind": kind, "message": message})

    def withdraw(self, kind: str, about: str) -> None:
        """Note that this is well again."""
        self._told.discard((kind, about))


class SnapshotCopies:
    """The copies of one job's snapshots that go to other nodes and come from them."""

    def __init__(
        self,
        spec: JobSpec,
        root: Path,
        store: Store,
        changes: Changes,
        notices: Notices,
        background: Background,
        peers: Peers,
        shift_ns: Callable[[], int],
    ) -> None:
        self._spec = spec
        self._root = root
        self._store = store
        self._changes = changes
        self._notices = notices
        self._background = background
        self._peers = peers
        self._shift_ns = shift_ns
        self._tasks: Tasks | None = None
        self._own: set[str] = set()
        """Kept snapshots that ranks of this node have written: no other node has them unless this one has sent them."""
        self._is_restoring = False
        self._copied: set[tuple[str, int]] = set()
        """Kept snapshots that enough nodes of this group have."""
        self._taking = asyncio.Lock()
        self.arriving: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, str] = {}
        self._free_at = 0.0
        self.requests: dict[str, PeerRequest] = {
            "snapshot_offer": self._on_offer,
            "snapshot_head": self._on_head,
            "snapshot_read": self._on_read,
            "snapshot_shards": self._on_shards,
        }

    def start(self, tasks: Tasks) -> None:
        """Begin to take what other nodes offer."""
        self._tasks = tasks

    def note_own(self, name: str) -> None:
        """Note that ranks of this node have written a kept snapshot."""
        self._own = {name, *self._own} & {one.id for one in self._store.kept}

    @contextlib.contextmanager
    def none_accepted(self) -> Iterator[None]:
        """Take nothing meanwhile: an offer of what is being restored would fetch it again into the same file."""
        self._is_restoring = True
        try:
            yield
        finally:
            self._is_restoring = False

    def begin_group(self) -> None:
        """Offer everything again: a node with a copy may have been lost."""
        self._copied.clear()

    async def send(self) -> None:
        """Offer the newest snapshots to other nodes until enough have them."""
        newest = {one.slot: one for one in self._store.kept}
        for one in newest.values():
            # A snapshot that is saved again with the same content counts from the later time on.
            saved = one.id, one.time_ns
            if saved not in self._copied and await self._offer(*saved):
                self._copied.add(saved)

    async def _offer(self, name: str, time_ns: int) -> bool:
        """Return whether enough nodes have it; nodes that are still fetching it are asked again later."""
        # A snapshot from another node, or from before this agent's start, may have its copies already.
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
        if wanted and self._taking.locked() and name not in self.arriving:
            # Snapshots are taken one at a time; meanwhile another node may be free.
            return Answer({"refused": ""})
        if not wanted or name in self._refused or self._tasks is None or self._is_restoring:
            return Answer({"refused": self._refused.get(name, "")})
        if name not in self.arriving:
            self.arriving[name] = self._tasks.spawn(self.take(node, name), f"snapshot {name}")
        return Answer({"arrives": True})

    async def take(self, node: str, name: str) -> None:
        try:
            # Snapshots are taken one at a time: two of them may share a content, which must arrive only once.
            async with self._taking:
                snapshot = await self.pull(node, name, slow=True)
                await self._changes.make(self._background.run, self._store.add, snapshot)
            self._notices.withdraw(SNAPSHOT_NOT_KEPT, node)
        except (CallFailed, PeerRefused, PeerUnreachable, WireError, asyncio.TimeoutError, Abandoned) as error:
            # It is offered again and continues where it was cut, unless its node now offers newer ones.
            log.info("snapshot %s from %s: %s", name, node, error)
        except (OSError, Problem) as error:
            self._refused = dict([*self._refused.items()][1 - MOST_TOLD :])
            self._refused[name] = str(error)
            self._notices.tell(SNAPSHOT_NOT_KEPT, f"a copy of a snapshot of {node} is not kept here: {error}", node)
            await self._changes.make(self._background.run, self._store.give_up, name)
        finally:
            self.arriving.pop(name, None)

    async def pull(self, node: str, name: str, *, slow: bool) -> KeptSnapshot:
        """Bring a snapshot from another node; raises Problem, OSError, and what a connection raises."""
        work = self._background.run if slow else asyncio.to_thread
        async with self._background.connected(node) as channel:
            answer = await channel.call("snapshot_head", {"id": name}, timeout=HEAD_TIMEOUT_S)
            snapshot = KeptSnapshot.read(answer.data, answer.body)
            self._store.check_place(snapshot)
            await self._changes.make(work, self._store.make_room, snapshot.slot, snapshot.size)
            missing = await self._changes.make(work, self._store.expect, snapshot)
        await self.fetch(node, missing, slow=slow)
        return snapshot

    async def fetch(self, node: str, missing: Mapping[str, tuple[int, int]], *, slow: bool) -> None:
        """Bring contents; `missing`: size and the bytes that are here of each. Raises what `pull` raises."""
        run = self._background.run if slow else asyncio.to_thread
        for sha, (_, here) in missing.items():
            opened: list[socket.socket] = []
            await to_the_end(run(self.receive, node, sha, here, slow, opened), partial(self._give_up, opened))

    def _give_up(self, opened: list[socket.socket]) -> None:
        """End what a thread receives; it may be waiting for a host without power."""
        self._changes.abandon.set()
        for sock in opened:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def receive(self, node: str, sha: str, here: int, slow: bool, opened: list[socket.socket]) -> None:
        """Bring one content over a connection of this thread's own, which `opened` gets."""
        with self._peers.open(node, PIECE_TIMEOUT_S) as sock:
            opened.append(sock)
            if self._changes.abandon.is_set():
                raise Abandoned
            pieces = bodies(sock, "snapshot_read", {"sha": sha, "offset": here, "slow": slow})
            self._store.receive(sha, here, pieces, self._changes.abandon.is_set)

    async def obtain(self, chosen: OfferedSnapshot) -> tuple[KeptSnapshot, str | None]:
        """Return a snapshot whose contents are here, and from which node they came; raises Problem."""
        name = str(chosen["id"])
        arriving = list(self.arriving.values())
        for task in arriving:
            task.cancel()
        await asyncio.gather(*arriving, return_exceptions=True)
        self._changes.abandon.clear()
        with contextlib.suppress(Problem):
            return self._store.get(name), None
        reasons = []
        for holder in chosen["holders"]:
            try:
                return await self.pull(str(holder), name, slow=False), str(holder)
            except (PeerRefused, PeerUnreachable, WireError, Problem, asyncio.TimeoutError, KeyError) as error:
                reasons.append(f"{holder}: {error}")
        raise Problem("no_snapshot", f"no node sent {chosen['path']}: {'; '.join(reasons)}")

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

    async def shards_of(self, node: str, snapshot: InPlace, question: dict[str, Any], *, slow: bool) -> dict[str, File]:
        """Bring the files of a snapshot that another node has; raises what `pull` raises."""
        async with self._background.connected(node) as channel:
            answer = await channel.call("snapshot_shards", question, timeout=SHARDS_TIMEOUT_S)
            files = unpack(answer.body).files
            asked = {f"{snapshot.place.name}/{name}" for name in question["names"]}
            if not set(files) <= asked:
                raise Problem("bad_snapshot", f"{node} sent files that {snapshot.path} does not name")
            work = self._background.run if slow else asyncio.to_thread
            missing = await self._changes.make(work, self._store.expect_shards, snapshot.path, files)
            await self.fetch(node, missing, slow=slow)
        return files

    async def _on_shards(self, node: str, channel: Channel | None, args: Args) -> Answer:
        names = [str(name) for name in args["names"] if is_shard(str(name))]
        latest_ns = int(args["time_ns"]) - self._shift_ns() + CLOCKS_NS
        take = self._store.take_shards
        files = await self._changes.make(
            asyncio.to_thread, take, str(args["path"]), names, latest_ns, self._changes.abandon.is_set
        )
        return Answer({}, pack(Manifest(files, {}, {})))


class SharedFiles:
    """Which files of this node the other nodes see, too: then a copy of them saves nothing."""

    def __init__(self, spec: JobSpec, base: Path, background: Background, peers: Peers) -> None:
        self._spec = spec
        self._base = base
        self._background = background
        self._peers = peers
        self._shared: dict[tuple[int, str], bool] = {}
        """Whether the other nodes see the same files, by device and pattern."""
        self._asked: Counter[tuple[int, str]] = Counter()
        """How often they were asked that, by device and pattern."""
        self.requests: dict[str, PeerRequest] = {"snapshot_sees": self._on_sees}

    def known(self, snapshot: InPlace) -> bool:
        """Return whether they have said so; raises OSError."""
        return self._shared.get(self._where(snapshot), False)

    async def look(self, snapshot: InPlace, *, ask_again: bool = True) -> bool:
        """Return whether they see the files of a snapshot; raises OSError."""
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

        One file system may have a shared directory and one that each node has for itself.
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

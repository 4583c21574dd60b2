"""The last output of a node's ranks, kept on another node: what they said before their host was lost.

In: the files that this node's ranks write; the ends of such files from other nodes; the journal. Out: in memory, the
newest 64 KiB of each file of another node's ranks. Once the journal says that this node is lost: files beside this
node's own logs, which say at their top what they are, and a report. They go when the lost node has its own again.

Each node sends what is new in its files to one other node, every 5 s, from a thread of idle priority. **Ranks that
write nothing cost nothing, and ranks that write fast cost 64 KiB a file and look.**
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.base.tasks import within
from remote_agent.diagnose.tracebacks import read_error_document
from remote_agent.election.peers import PeerRefused, PeerUnreachable
from remote_agent.text.names import RANK_FOLDER
from remote_agent.text.shapes import clip
from remote_agent.wire import Answer, Args, CallFailed, Channel, Items, WireError
from remote_agent.wire.documents import COPY_MARK
from remote_agent.wire.events import EventType

if TYPE_CHECKING:
    from remote_agent.agent.background import Background
    from remote_agent.agent.snapshot_keeper import MemberView
    from remote_agent.base.paths import JobFiles
    from remote_agent.base.tasks import Tasks
    from remote_agent.coordinator.journal import Journal
    from remote_agent.election.election import PeerRequest
    from remote_agent.election.peers import Peers
    from remote_agent.logs import LogStore
    from remote_agent.wire.documents import EvidenceEntry, JournalEvent

log = logging.getLogger(__name__)

LOOK_S = 5.0
END_BYTES = 64 * 1024
# The limit for all files of one node: nodes with more ranks send shorter ends.
NODE_BYTES = 4 * 1024 * 1024
# A node sends to one other node; several send to the same node only if most of the others are lost.
MAX_NODES = 4
# Each file counts as at least this many bytes.
LEAST_BYTES = 1024
ERROR = "error.json"
NAMES = ("stdout.log", "stderr.log", "nccl.log", ERROR)
# An incident gets this many lines; the last lines of the node's other ranks are in the logs.
MAX_LINES = 12


class RankFile(NamedTuple):
    """One file of one rank."""

    generation: int
    rank: int
    name: str


class End(NamedTuple):
    """The newest bytes of a file."""

    size: int
    """The size of the whole file."""
    body: bytes


class LastOutputKeeper:
    """The last output of one job's ranks: this node's for another one, and that of other nodes here."""

    def __init__(
        self, files: JobFiles, node: str, background: Background, peers: Peers, logs: LogStore, journal: Journal
    ) -> None:
        self._files = files
        self._node = node
        self._background = background
        self._peers = peers
        self._logs = logs
        self._journal = journal
        self._member: MemberView | None = None
        self._tasks: Tasks | None = None
        self._reader: list[str] = []
        """The node that takes the ends of this node's files; the list is that connection's own."""
        self._reading: dict[str, asyncio.Task[None]] = {}
        """The task that reads the ends of a node's files."""
        self._kept: dict[str, dict[RankFile, End]] = {}
        """The ends of a node's files, of its newest generation."""
        self._returned: set[str] = set()
        """Nodes that are back, and may have the files themselves that were copied here."""
        self._news = asyncio.Event()
        """Set when a node has returned."""
        self.requests: dict[str, PeerRequest] = {
            "last_output_offer": self._on_offer,
            "last_output": self._on_read,
            "last_output_own": self._on_own,
        }

    def start(self, tasks: Tasks, member: MemberView) -> None:
        """Begin to offer the ends of this node's files, and to look for lost nodes in the journal."""
        self._tasks, self._member = tasks, member
        tasks.spawn(self._repeat(), "last output")
        tasks.spawn(self._follow_journal(), "last output of lost nodes")

    # The output of this node's ranks

    async def _repeat(self) -> None:
        """Look for a node that takes this node's output, drop copies of nodes that returned; until cancelled."""
        while True:
            await within(self._news, LOOK_S)
            self._news.clear()
            await self._give_way(set(self._returned))
            running = self._running()
            if running is not None and not self._reader:
                await self._offer(running)

    async def _offer(self, generation: int) -> None:
        """Ask the other nodes, members of the group first, until one takes the ends."""
        members = ranks_by_node(self._journal.records, generation)
        for name in sorted(self._background.others(), key=lambda each: each not in members):
            answer = await self._peers.ask(name, "last_output_offer", {})
            if answer and answer.get("takes"):
                return

    def _running(self) -> int | None:
        return None if self._member is None else self._member.running

    async def _on_read(self, node: str, channel: Channel | None, args: Args) -> Items:
        return self._changes([node])

    async def _changes(self, reader: list[str]) -> Items:
        """Yield the ends of this node's files as they change, until the other node closes, is lost or reads again."""
        sent: dict[RankFile, tuple[int, int]] = {}
        self._reader = reader
        try:
            while self._reader is reader:
                running = self._running()
                for piece in () if running is None else await self._background.run(self._read_new, running, sent):
                    yield piece
                await asyncio.sleep(LOOK_S)
        finally:
            if self._reader is reader:
                self._reader = []

    def _read_new(self, generation: int, sent: dict[RankFile, tuple[int, int]]) -> list[Answer]:
        """Return what is new at the ends of a generation's files; `sent`: inode and size of each when it was sent."""
        for place in [each for each in sent if each.generation != generation]:
            del sent[place]
        folder = self._files.generation(generation)
        with contextlib.suppress(FileNotFoundError):
            ranks = [int(match[1]) for name in os.listdir(folder) if (match := RANK_FOLDER.fullmatch(name))]
            limit = _limit(len(ranks))
            places = [RankFile(generation, rank, name) for rank in sorted(ranks) for name in NAMES]
            return [piece for place in places for piece in self._read_end(place, limit, sent)]
        return []

    def _read_end(self, place: RankFile, limit: int, sent: dict[RankFile, tuple[int, int]]) -> Iterator[Answer]:
        path = self._files.rank(place.generation, place.rank) / place.name
        try:
            # A fifo in place of a log must not block the thread.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return
        try:
            info = os.fstat(file)
            inode, size = sent.get(place, (info.st_ino, 0))
            if not stat.S_ISREG(info.st_mode) or (inode, size) == (info.st_ino, info.st_size):
                return
            if place.name == ERROR and info.st_size > limit:
                # Half a JSON document is of no use.
                return
            is_longer = inode == info.st_ino and size < info.st_size and place.name != ERROR
            begin = max(size if is_longer else 0, info.st_size - limit)
            body = os.pread(file, limit, begin)
        finally:
            os.close(file)
        sent[place] = info.st_ino, begin + len(body)
        yield Answer({**place._asdict(), "begin": begin}, body)

    # The output of other nodes' ranks

    async def _on_offer(self, node: str, channel: Channel | None, args: Args) -> Answer:
        # A node offers only while it has no reader, so an earlier connection was lost unnoticed.
        self._forget(node)
        if len(self._reading) >= MAX_NODES or self._tasks is None:
            return Answer({"takes": False})
        # The ends of nodes that now send to another node make room, the oldest first.
        stale = [each for each in self._kept if each not in self._reading and each != node]
        while len(self._kept) >= 2 * MAX_NODES:
            del self._kept[stale.pop(0)]
        self._reading[node] = self._tasks.spawn(self._take(node), f"last output of {node}")
        return Answer({"takes": True})

    def _forget(self, node: str) -> None:
        """End the connection over which a node sends."""
        if node in self._reading:
            self._reading.pop(node).cancel()

    async def _take(self, node: str) -> None:
        """Take the ends of a node's files as they change, until the connection ends."""
        try:
            async with self._background.connected(node) as channel:
                pieces = channel.stream("last_output", {})
                try:
                    async for piece in pieces:
                        self._keep(node, piece)
                finally:
                    await pieces.aclose()
        except (PeerRefused, PeerUnreachable, WireError, CallFailed, KeyError, TypeError, ValueError) as error:
            log.info("last output of %s: %s", node, error)
        finally:
            if self._reading.get(node) is asyncio.current_task():
                del self._reading[node]

    def _keep(self, node: str, piece: Answer) -> None:
        """Add new bytes; raises KeyError, TypeError, ValueError for what no agent of ours sends."""
        place = RankFile(int(piece.data["generation"]), int(piece.data["rank"]), str(piece.data["name"]))
        begin = int(piece.data["begin"])
        if place.name not in NAMES or min(place.generation, place.rank, begin) < 0:
            raise ValueError(f"no file of a rank: {place}")
        own = self._kept.setdefault(node, {})
        newest = max((known.generation for known in own), default=-1)
        if place.generation < newest:
            return
        if place.generation > newest:
            own.clear()
            log.info("the last output of %s in generation %d is kept here", node, place.generation)
        known = own.get(place)
        before = known.body if known is not None and known.size == begin else b""
        limit = _limit(len({known.rank for known in own} | {place.rank}))
        own[place] = End(begin + len(piece.body), (before + piece.body)[-limit:])
        if sum(max(LEAST_BYTES, len(end.body)) for end in own.values()) > 2 * NODE_BYTES:
            del own[place]
            raise ValueError("more than a node may send")

    # Nodes that are lost, and nodes that return

    async def _follow_journal(self) -> None:
        """Write down what lost nodes have sent, and note which nodes return, until cancelled."""
        async for record in self._journal.follow(0):
            node = str(record["node"])
            if record["type"] == EventType.NODE_READY:
                self._note_returned(node)
            elif record["type"] == EventType.GENERATION_STARTED:
                # A node that had lost only its workers takes part again without an event of its own.
                self._note_returned(*(str(member["node"]) for member in record["detail"]["members"]))
            elif record["type"] in (EventType.NODE_LOST, EventType.NODE_FAILED):
                self._returned.discard(node)
                if node in self._reader:
                    self._reader = []
                if node in self._kept:
                    self._forget(node)
                    await self._write_down(node, record)

    def _note_returned(self, *nodes: str) -> None:
        self._returned.update(nodes)
        self._news.set()

    async def _write_down(self, node: str, record: JournalEvent) -> None:
        """Put the ends of a lost node's files next to this node's own logs, and report their last lines."""
        kept = self._kept.pop(node)
        generation = next(iter(kept)).generation
        # The journal, not the node, determines whose ranks these are.
        own = ranks_by_node(self._journal.records, generation).get(node, frozenset())
        ends = {place: end for place, end in kept.items() if place.rank in own and end.body}
        try:
            lines = await self._background.run(self._write, node, ends, str(record["time"]))
        except OSError as error:
            log.warning("the last output of %s cannot be written: %s", node, error)
            return
        # If it had left the group before, its output says nothing about the incident.
        is_news = lines and generation == record["generation"]
        if self._tasks is not None:
            # The node may have lost only its workers.
            self._tasks.spawn(self._give_way({node}), f"last output of {node}")
        if is_news and self._member is not None:
            ranks = sorted({place.rank for place in ends})
            report = {"generation": generation, "of": node, "ranks": ranks, "evidence": lines[:MAX_LINES]}
            self._member.report("last_output", report)

    def _write(self, node: str, ends: Mapping[RankFile, End], time: str) -> list[EvidenceEntry]:
        """Write these ends; returns the last line of each file, as evidence."""
        lines: list[EvidenceEntry] = []
        for rank in sorted({place.rank for place in ends}):
            generation = next(iter(ends)).generation
            folder = self._files.rank(generation, rank)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The mark is written before the logs, so that any reader of the logs knows whose they are.
            (folder / COPY_MARK).write_text(json.dumps({"node": node}))
            for name in NAMES:
                end = ends.get(RankFile(generation, rank, name))
                if end is None:
                    continue
                if name == ERROR:
                    (folder / name).write_bytes(end.body)
                    last_line, number = _message(end.body), None
                else:
                    text = _with_note(node, self._node, rank, name, end, time)
                    (folder / name).write_bytes(text)
                    whole = text.rstrip().splitlines()
                    last_line, number = whole[-1].decode("utf-8", "replace").strip(), len(whole)
                if last_line:
                    file = f"generation_{generation}/rank_{rank}/{name}"
                    text_of = clip(f"last output on {node}: {last_line}")
                    lines.append({"node": self._node, "rank": rank, "file": file, "line": number, "text": text_of})
        return lines

    def _copies(self) -> Iterator[tuple[str, int, int, Path]]:
        """Yield node, generation, rank and directory of each copy that was written down here."""
        for mark in self._files.root.glob(f"generation_*/rank_*/{COPY_MARK}"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                numbers = [int(folder.name.partition("_")[2]) for folder in (mark.parent.parent, mark.parent)]
                yield str(json.loads(mark.read_bytes())["node"]), numbers[0], numbers[1], mark.parent

    async def _give_way(self, nodes: set[str]) -> None:
        """Remove copies of files that these nodes have themselves; one that has returned is asked until it answers."""
        if not nodes:
            return
        copies = [copy for copy in await self._background.run(lambda: list(self._copies())) if copy[0] in nodes]
        owners = {copy[0] for copy in copies}
        self._returned -= nodes - owners
        for node in sorted(owners):
            await self._give_way_to(node, [copy for copy in copies if copy[0] == node])

    async def _give_way_to(self, node: str, copies: Sequence[tuple[str, int, int, Path]]) -> None:
        answer = await self._peers.ask(node, "last_output_own", {"ranks": [copy[1:3] for copy in copies]})
        if answer is None:
            return
        self._returned.discard(node)
        there = [list(each) for each in answer.get("ranks", ())]
        for _, generation, rank, folder in copies:
            if [generation, rank] in there:
                await self._background.run(shutil.rmtree, folder, True)
                # The log store forgets them only now: earlier it would find the files again.
                self._logs.forget(generation, rank)

    async def _on_own(self, node: str, channel: Channel | None, args: Args) -> Answer:
        asked = [(int(generation), int(rank)) for generation, rank in args["ranks"]]
        folders = {each: self._files.rank(*each) for each in asked}
        is_own = [each for each, path in folders.items() if path.is_dir() and not (path / COPY_MARK).exists()]
        return Answer({"ranks": is_own})


def _limit(ranks: int) -> int:
    """Return how much of the end of each file is kept, in bytes, of a node with this many ranks."""
    return min(END_BYTES, NODE_BYTES // (len(NAMES) * max(1, ranks)))


def ranks_by_node(records: list[JournalEvent], generation: int) -> dict[str, frozenset[int]]:
    """Return which ranks each member of a generation had, by the journal."""
    ranks: dict[str, frozenset[int]] = {}
    for record in records:
        if record["generation"] != generation:
            continue
        detail = record["detail"]
        if record["type"] == EventType.GENERATION_STARTED:
            for member in detail["members"]:
                first = int(member["base_rank"])
                ranks[str(member["node"])] = frozenset(range(first, first + int(member["nproc"])))
        elif record["type"] == EventType.RANKS_ASSIGNED:
            ranks[str(record["node"])] = frozenset(int(rank) for rank, *_ in detail["ranks"])
    return ranks


def _with_note(node: str, keeper: str, rank: int, name: str, end: End, time: str) -> bytes:
    """Return a log from its end, with a line at its top that says what it is."""
    body = end.body
    if len(body) < end.size:
        # The first line is incomplete.
        body = body[body.find(b"\n") + 1 :]
    amount = f"the last {len(body):,} of {end.size:,} bytes" if len(body) < end.size else f"{end.size:,} bytes"
    stamp = datetime.datetime.fromisoformat(time.rstrip("Z")).strftime("%Y-%m-%d %H:%M:%S")
    head = f"supervisor: rank {rank} wrote this on {node}, which was lost at {stamp} UTC"
    what = f"{keeper} has {amount} of its {name}, without the output of its last {LOOK_S:g} s"
    newline = b"" if body.endswith(b"\n") else b"\n"
    return f"{head}; {what}\n".encode() + body + newline


def _message(body: bytes) -> str:
    """Return the last line of the exception in an error file, "" where there is none."""
    error = read_error_document(body, 0)
    lines = error["message"].strip().splitlines() if error is not None else []
    return lines[-1].strip() if lines else ""

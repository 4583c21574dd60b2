"""The job's journal: every fact of the job, in order, one JSON line each, the same on every node.

In: records made by the coordinator. Out: `events.jsonl`, records since a number, a wake-up for followers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from remote_agent.base.files import atomic_write
from remote_agent.base.tasks import to_the_end, within
from remote_agent.wire.documents import parse_event
from remote_agent.wire.gate import Misfit

if TYPE_CHECKING:
    from remote_agent.wire.documents import JournalEvent

log = logging.getLogger(__name__)

# This is far below the limit of a frame.
CHUNK_BYTES = 1024 * 1024
# The pause before writing is retried after a failure.
RETRY_S = 5.0


def read_records(path: Path) -> list[JournalEvent]:
    """Return the records of a journal file up to the first that cannot be read: the last line may be half-written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    records: list[JournalEvent] = []
    for line in data.splitlines():
        try:
            record = parse_event(line)
            if record["seq"] != len(records) + 1:
                raise Misfit(f"has number {record['seq']}")
        except Misfit as error:
            log.warning("%s: cannot be read from line %d on: %s", path, len(records) + 1, error)
            break
        records.append(record)
    return records


def public(record: JournalEvent) -> JournalEvent:
    """Return a record as `events --json` shows it."""
    # The term and the fields of a newer version are left out: only agents use them.
    return {
        "seq": record["seq"], "time": record["time"], "type": record["type"], "generation": record["generation"],
        "node": record["node"], "rank": record["rank"], "detail": record["detail"],
    }  # fmt: skip


def age(records: Sequence[JournalEvent]) -> tuple[int, int]:
    """Return term and number of the newest of a journal's records; 0 and 0 when there is none."""
    return (int(records[-1].get("term", 0)), len(records)) if records else (0, 0)


class Journal:
    """The journal of one node: memory for answers, a file for the next reader. Numbers start at 1, without gaps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records = read_records(path)
        self._hashed: tuple[object, str] = None, ""
        """The record of which a hash was last wanted, and that hash."""
        self._arriving: list[JournalEvent] = []
        """The pieces so far of a journal that is to replace this one."""
        self._changed = asyncio.Event()
        self._ended = False
        self._file: TextIO | None = None
        """The open file; None while it must be written anew: records are missing in it, or it has others."""
        self._anew = asyncio.Event()
        self._rewriting = asyncio.Lock()
        self._is_full = False
        """Whether the last attempt to write has failed."""
        try:
            self._replace(self.records)
            self._file = path.open("a")
        except OSError as error:
            self._fail(error)

    @property
    def last_seq(self) -> int:
        """The number of the newest record, 0 when there is none."""
        return len(self.records)

    @property
    def last_term(self) -> int:
        """The term in which the newest record was made."""
        return self.age[0]

    @property
    def age(self) -> tuple[int, int]:
        """Term and number of the newest record: of two journals, the newer one has the larger pair."""
        return age(self.records)

    def digest(self, seq: int) -> str:
        """Return a short hash of the record with that number, to compare two journals; "" for 0."""
        if not 0 < seq <= len(self.records):
            return ""
        record = self.records[seq - 1]
        if self._hashed[0] is not record:
            # A thousand nodes that join have the same last record.
            text = json.dumps(record, sort_keys=True)
            self._hashed = record, hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._hashed[1]

    def since(self, seq: int) -> list[JournalEvent]:
        """Return the records after that number."""
        return self.records[max(0, seq) :]

    def tail(self) -> dict[str, Any]:
        """Return what another journal needs to find the records that this one lacks."""
        return {"term": self.last_term, "seq": self.last_seq, "digest": self.digest(self.last_seq)}

    def lacks(self, tail: Mapping[str, Any]) -> tuple[bool, int]:
        """Return after which record the journal with that tail lacks ours; True and 0 if its tail is not ours."""
        seq = int(tail["seq"])
        ours = seq <= self.last_seq and self.digest(seq) == tail["digest"]
        return (False, seq) if ours else (True, 0)

    def take(self, records: list[JournalEvent], *, reset: bool = False, more: bool = False) -> bool:
        """Add records that follow the last one; return False if records before these are missing.

        `reset`: they replace all records, because no other journal has our last ones. Until the last piece of the new
        journal is here (`more`: it is not), the old one counts: a part of the new one may lack groups that both know.
        """
        arrived, self._arriving = self._arriving, []
        if reset:
            arrived = records if not records or records[0]["seq"] == 1 else arrived + records
            if arrived and arrived[-1]["seq"] != len(arrived):
                return False
            if more:
                self._arriving = arrived
                return True
            self.records = list(arrived)
            self.close()
            self._anew.set()
            self._wake()
            return True
        for record in records:
            self.append(record)
        return not records or records[-1]["seq"] <= self.last_seq

    def append(self, record: JournalEvent) -> None:
        """Add the next record, in memory and in the file; a record that is already known is ignored."""
        if record["seq"] != self.last_seq + 1:
            return
        self.records.append(record)
        self._write((record,))
        self._wake()

    async def keep_written(self) -> None:
        """Write the file anew where that is needed, until cancelled; what a full disk has not taken is retried."""
        while True:
            await self._anew.wait()
            with contextlib.suppress(OSError):
                await self._write_anew()
                continue
            await asyncio.sleep(RETRY_S)

    async def sync(self) -> None:
        """Make all records durable: they are there after a loss of power, too; raises OSError."""
        file = await self._write_anew()
        # The file may be closed meanwhile.
        fd = os.dup(file.fileno())
        try:
            await to_the_end(asyncio.to_thread(os.fsync, fd))
        finally:
            os.close(fd)

    def end(self) -> None:
        """Let followers end once they have read all."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk may not have taken the last bytes
                self._file.close()
            self._file = None

    async def follow(self, seq: int) -> AsyncGenerator[JournalEvent, None]:
        """Yield the records after that number, then each new one, until `end`.

        If other records replace those at the end, they are yielded too, so a number occurs twice.
        """
        records = self.records
        while True:
            changed = self._changed
            if self.records is not records:
                seq = min(seq, _same(records, self.records))
                records = self.records
            for record in self.since(seq):
                seq = record["seq"]
                yield record
            if seq >= self.last_seq:
                if self._ended:
                    return
                await changed.wait()

    async def wait_change(self, timeout: float) -> None:
        """Return at the next record, or after that many seconds."""
        await within(self._changed, timeout)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _write(self, records: Sequence[JournalEvent]) -> None:
        """Append records to the file, or have it written anew where that fails: no gap may stay in it.

        A full disk must not stop the job: memory still has everything.
        """
        if self._file is None:
            self._anew.set()
            return
        try:
            self._file.write(_lines(records))
            self._file.flush()
        except OSError as error:
            self._fail(error)

    async def _write_anew(self) -> TextIO:
        """Return the file once it has all records; raises OSError. A slow disk holds up nothing else meanwhile."""
        async with self._rewriting:
            while self._file is None:
                whole, count = self.records, len(self.records)
                try:
                    await to_the_end(asyncio.to_thread(self._replace, whole[:]))
                    if whole is self.records:
                        self._file = self._path.open("a")
                        self._write(whole[count:])
                except OSError as error:
                    self._fail(error)
                    raise
            self._anew.clear()
            self._is_full = False
            return self._file

    def _replace(self, records: Sequence[JournalEvent]) -> None:
        atomic_write(self._path, _lines(records).encode())

    def _fail(self, error: OSError) -> None:
        if not self._is_full:
            log.warning("%s cannot be written: %s", self._path, error)
        self._is_full = True
        self.close()
        self._anew.set()


def _lines(records: Sequence[JournalEvent]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _same(some: Sequence[JournalEvent], others: Sequence[JournalEvent]) -> int:
    """Return how many records two journals have in common."""
    pairs = enumerate(zip(some, others))
    return next((at for at, (one, other) in pairs if one != other), min(len(some), len(others)))


def chunks(records: list[JournalEvent]) -> Iterator[list[JournalEvent]]:
    """Cut records into pieces that fit a frame each; at least one piece, possibly empty."""
    chunk: list[JournalEvent] = []
    size = 0
    for record in records:
        length = len(json.dumps(record))
        if chunk and size + length > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(record)
        size += length
    yield chunk

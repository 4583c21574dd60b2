"""The job's journal: every fact of the job, in order, one JSON line each, the same on every node.

In: records made by the coordinator. Out: `events.jsonl`, records since a number, a wake-up for followers.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any, TextIO

Record = dict[str, Any]
# What a reader of `events` sees; the term is between agents.
PUBLIC_KEYS = ("seq", "time", "type", "generation", "node", "rank", "detail")


def utc(time_ns: int) -> str:
    """Return a time as the contract writes it: UTC, milliseconds, Z."""
    moment = datetime.datetime.fromtimestamp(time_ns / 1e9, tz=datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def read_records(path: Path) -> list[Record]:
    """Return the whole records of a journal file; a half-written last line is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    records: list[Record] = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict) or record.get("seq") != len(records) + 1:
            break
        records.append(record)
    return records


def public(record: Record) -> Record:
    """Return a record as `events --json` shows it."""
    return {key: record.get(key) for key in PUBLIC_KEYS}


class Journal:
    """The journal of one node: memory for answers, a file for the next reader. Numbers start at 1, without gaps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records = read_records(path)
        self._changed = asyncio.Event()
        self._ended = False
        self._file = self._rewrite()

    @property
    def last_seq(self) -> int:
        """The number of the newest record, 0 when there is none."""
        return len(self.records)

    @property
    def last_term(self) -> int:
        """The term in which the newest record was made."""
        return int(self.records[-1].get("term", 0)) if self.records else 0

    def digest(self, seq: int) -> str:
        """Return a short hash of the record with that number, to compare two journals; "" for 0."""
        if not 0 < seq <= len(self.records):
            return ""
        text = json.dumps(self.records[seq - 1], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def since(self, seq: int) -> list[Record]:
        """Return the records after that number."""
        return self.records[max(0, seq) :]

    def append(self, record: Record) -> None:
        """Add the next record, in memory and in the file; one that is known already is left out."""
        if record["seq"] != self.last_seq + 1:
            return
        self.records.append(record)
        with contextlib.suppress(OSError):  # a full disk must not stop the job; memory still has it
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        self._wake()

    def extend(self, records: Iterable[Record]) -> None:
        """Add records that follow the last one."""
        for record in records:
            self.append(record)

    def reset(self, records: list[Record]) -> None:
        """Take over another journal: this one had a tail that nobody else knows."""
        self.records = list(records)
        self._file.close()
        self._file = self._rewrite()
        self._wake()

    def end(self) -> None:
        """Let followers end once they have read all."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    async def follow(self, seq: int) -> AsyncGenerator[Record, None]:
        """Yield the records after that number, then each new one, until `end`."""
        while True:
            changed = self._changed
            for record in self.since(seq):
                seq = record["seq"]
                yield record
            if seq >= self.last_seq:
                if self._ended:
                    return
                await changed.wait()

    async def wait_change(self, timeout: float) -> None:
        """Return when a record comes, or after that many seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _rewrite(self) -> TextIO:
        fresh = self._path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        os.replace(fresh, self._path)
        return self._path.open("a")

"""A recording is opened: checked as a whole, its logs read when they are looked at.

In: a file. Out: events, statuses and log lines by time; one clear error for a file that is none of ours.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from remote_agent.diagnose.told import told_incidents
from remote_agent.wire.changes import merge
from supervisor.recording import form
from supervisor.recording.form import File, Line, RecordingError
from supervisor.session.view import HostView

# Logs that stay in memory, and what a row takes beside its text; what was not looked at for longest goes first.
HELD_BYTES = 512 * 1024 * 1024
ROW_COST = 250
# What is recorded of how far we had come with a host.
HOST = ("name", "state", "step", "text", "error", "hint")
_BROKEN_FILE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
_BROKEN = (*_BROKEN_FILE, AttributeError, KeyError, TypeError, ValueError)

Json = dict[str, Any]


class Lines:
    """The recorded lines of one file, in order; each gap between them is one line that tells how much is missing."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.rows: list[Line] = []
        expected = last_ns = 0
        for line in lines:
            last_ns = max(line.t_ns, last_ns)
            if line.line > expected:
                text = f"({line.line - expected:,} lines up to here are not in the recording)"
                self.rows.append(Line(line.line - 1, line.offset, last_ns, None, text.encode()))
            self.rows.append(line if line.t_ns == last_ns else line._replace(t_ns=last_ns))
            expected = line.line + 1
        self._look_up()

    def _look_up(self) -> None:
        self.numbers = array("q", [row.line for row in self.rows])
        self.times_ns = array("q", [row.t_ns for row in self.rows])
        """Of each row; never before that of the row above, as the order of lines is certain."""
        self.size = sum(len(row.text) + ROW_COST for row in self.rows)

    def only(self, rows: list[Line]) -> Lines:
        """Return some of these rows."""
        found = Lines()
        found.rows = rows
        found._look_up()
        return found

    def there(self, now_ns: int) -> int:
        """Return how many of the rows there are at a time."""
        return bisect_right(self.times_ns, now_ns)

    def total(self, now_ns: int) -> int:
        """Return how many lines the file has at a time, as far as the recording tells."""
        there = self.there(now_ns)
        return self.numbers[there - 1] + 1 if there else 0

    def window(self, first: int, last: int) -> Iterator[Line]:
        """Yield the lines from `first` up to `last`; one that was not recorded says so."""
        at = bisect_left(self.numbers, first)
        for number in range(first, last):
            row = self.rows[at]
            if row.line == number:
                at += 1
                yield row
            else:
                yield Line(number, row.offset, row.t_ns, None, b"(not in the recording)")


class Recording:
    """What a file holds."""

    def __init__(self, path: Path, file: zipfile.ZipFile) -> None:
        self.path = path
        self._file = file
        self.meta: Json = _meta(path, file)
        self.events: list[Json] = _documents(file, form.EVENTS)
        # The clock of a coordinator that took over may be behind; the order of the journal is certain.
        self.event_times_ns = list(accumulate((form.read_time(event["time"]) for event in self.events), max))
        self._statuses = file.read(form.STATUSES).splitlines()
        rows = list(map(json.loads, self._statuses))
        self.status_times_ns = list(accumulate((int(row["t_ns"]) for row in rows), max))
        self._wholes = [number for number, row in enumerate(rows) if row["whole"]]
        self._folded: tuple[int, Json] = (0, {})
        self.hosts = [HostView(**{key: host[key] for key in HOST}) for host in self.meta["hosts"]]
        index = _documents(file, form.LOGS)
        self.files: dict[File, Json] = {
            (str(one["node"]), int(one["generation"]), int(one["rank"]), str(one["stream"])): one
            for one in index
            if one["begin_ns"] is not None
        }
        if [event["seq"] for event in self.events] != list(range(1, len(self.events) + 1)):
            raise ValueError("the journal has gaps")
        # What cannot be played is told now, not in the middle of it.
        told_incidents(self.events)
        for number in (*self._wholes, len(rows)):
            self.status(number)
        self.job = str(self.meta["job"])
        self.begin_ns = min([*self.event_times_ns[:1], *self.status_times_ns[:1]], default=0)
        self.end_ns = max(int(self.meta["end_ns"]), self.begin_ns)
        self.narrowed_by: object = None
        self.narrowed: dict[File, Lines] = {}
        """What the newest filter keeps of each file."""
        self._held: OrderedDict[File, Lines] = OrderedDict()
        self._held_bytes = 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def status(self, count: int) -> Json:
        """Return the status after so many changes."""
        at, status = self._folded
        whole = bisect_left(self._wholes, count)
        start = self._wholes[whole - 1] if whole else 0
        if not start <= at <= count:
            at, status = start, {}
        for line in self._statuses[at:count]:
            row = json.loads(line)
            status = merge({} if row["whole"] else status, row["changes"])
        self._folded = (count, status)
        return status

    def is_held(self, file: File) -> bool:
        """Whether the lines of a file are in memory."""
        return file in self._held

    def lines(self, file: File) -> Lines:
        """Return the recorded lines of one file; raises RecordingError where they cannot be read."""
        found = self._held.get(file)
        if found is None:
            try:
                found = Lines(form.read_lines(self._file.read(self.files[file]["member"])))
            except (*_BROKEN, OSError) as error:
                raise _damaged(self.path, error) from error
            self._held[file] = found
            self._held_bytes += found.size
            while len(self._held) > 1 and self._held_bytes > HELD_BYTES:
                self._held_bytes -= self._held.popitem(last=False)[1].size
        self._held.move_to_end(file)
        return found


def load(path: Path) -> Recording:
    """Open a recording; raises RecordingError."""
    try:
        file = zipfile.ZipFile(path)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        with path.open("rb") as begin:
            if begin.read(4) == b"PK\x03\x04":
                raise _damaged(path, error) from error
        raise RecordingError(f"{path}: not a recording", "`supervisor record` makes one") from error
    try:
        return Recording(path, file)
    except RecordingError:
        file.close()
        raise
    except (*_BROKEN, OSError) as error:
        file.close()
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> RecordingError:
    return RecordingError(f"{path}: the recording is cut short or damaged ({error})", "copy it, or record it, again")


def _meta(path: Path, file: zipfile.ZipFile) -> Json:
    if form.META not in file.namelist():
        raise RecordingError(f"{path}: not a recording", "`supervisor record` makes one")
    meta = json.loads(file.read(form.META))
    if meta["format"] != form.FORMAT:
        raise RecordingError(f"{path}: not a recording", "`supervisor record` makes one")
    if int(meta["version"]) > form.VERSION:
        raise RecordingError(
            f"{path}: written by supervisor {meta.get('supervisor')}, in form {meta['version']}; "
            f"this one reads up to form {form.VERSION}",
            "install a newer supervisor",
        )
    return dict(meta)


def _documents(file: zipfile.ZipFile, member: str) -> list[Json]:
    documents = [json.loads(line) for line in file.read(member).splitlines()]
    if not all(isinstance(document, dict) for document in documents):
        raise ValueError(f"{member}: not a list of objects")
    return documents

"""The export of a log: a record in a dialog; all lines, page by page, in a file or in a pager.

In: the line that is read, the log that is shown. Out: a dialog, a file, the user's pager, the progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from textual.app import SuspendNotSupported

from remote_agent.text.names import count
from remote_agent.text.rows import RecordReader
from remote_agent.wire import Args, WireError
from supervisor.errors import RequestFailed, SupervisorError, Unreachable, why
from supervisor.logs.files import read_rest
from supervisor.tui import terminal
from supervisor.tui.dialogs.base import TextDialog
from supervisor.tui.logs import ansi
from supervisor.tui.rows.spans import clean, wrap
from supervisor.wording import values
from supervisor.wording.values import cut_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from remote_agent.wire import Answer
    from supervisor.logs.merge import Page
    from supervisor.logs.rows import LogLine
    from supervisor.logs.selection import Selection
    from supervisor.tui.logs.feeds import Feed
    from supervisor.tui.logs.row import LineKey, LogRow
    from supervisor.tui.rows.spans import Row
    from supervisor.tui.screens.logs.shown import ShownLog
    from supervisor.tui.shell import Level, Shell
    from supervisor.tui.source import SessionSource
    from supervisor.tui.widgets.ask import Ask

# One request asks for this many rows, about 400 kB.
ROWS: Final = 4096
# A page, or the rest of a line, is awaited this long, seconds.
DEADLINE: Final = 60.0


@dataclasses.dataclass(frozen=True)
class LineFormat:
    """What a line of the file contains besides its text."""

    time: bool
    source: bool
    colour: bool = False

    def line(self, row: LogLine) -> bytes:
        """Return one line of the file; without its newline if its text is cut."""
        when = f"{values.date_ns(row.t_ns, millis=True)} " if self.time else ""
        who = f"{clean(row.node)}:{row.rank}| " if self.source else ""
        return f"{when}{who}".encode("utf-8", "replace") + self.text(row.text) + (b"" if row.cut else b"\n")

    def text(self, raw: bytes) -> bytes:
        """Return the text of a line, or a part of it."""
        return (ansi.coloured(raw) if self.colour else ansi.plain(raw)).encode("utf-8", "replace")


class Export:
    """The export of the lines that exist when it begins."""

    def __init__(
        self,
        source: SessionSource,
        selection: Selection,
        only: str | None,
        form: LineFormat,
        wanted: LineKey | None = None,
    ) -> None:
        self.lines = 0
        self.absent: set[str] = set()
        """Nodes whose lines may be missing."""
        self.at = 1
        """The line number in the file of the wanted line, counted from 1."""
        self._wanted = wanted
        self._source = source
        self._selection = selection
        self._only = only
        """The only stream that is exported; None: all."""
        self._form = form

    def progress_text(self) -> str:
        """Return the progress in words."""
        return f"{count(self.lines, 'line')} saved"

    async def write(self, file: IO[bytes]) -> None:
        """Write all lines; raises SupervisorError, WireError, TimeoutError, OSError."""
        newest = await self._page(count=1)
        until_ns = max(newest.rows[-1].t_ns if newest.rows else 0, newest.until_ns or 0)
        after_ns = 0
        while after_ns <= until_ns:
            page = await self._page(ROWS, clocks=newest.clocks, after_ns=after_ns)
            rows = [row for row in page.rows if after_ns <= row.t_ns <= until_ns and self._only in (None, row.stream)]
            # With a filter a page may be empty, and the search has still advanced.
            asked_ns, after_ns = after_ns, max(page.rows[-1].t_ns + 1 if page.rows else 0, page.until_ns or 0)
            if page.more and after_ns <= asked_ns:
                raise RequestFailed("a node is still indexing files that are older than its agent", "try again")
            await self._put(file, rows)
            if not page.more:
                return

    async def _page(self, count: int, **bounds: Any) -> Page:
        page = await asyncio.wait_for(self._source.merged(self._selection, count, **bounds), DEADLINE)
        self.absent.update(page.absent)
        return page

    async def _log(self, node: str, op: str, args: Args) -> Answer:
        return await asyncio.wait_for(self._source.log(node, op, args), DEADLINE)

    async def _put(self, file: IO[bytes], rows: list[LogLine]) -> None:
        """Write lines in full, in a thread: a slow disk must not block the screen."""
        begin = 0
        for end, row in enumerate(rows, 1):
            if row.cut:
                await asyncio.to_thread(self._write, file, rows[begin:end])
                await self._put_rest(file, row)
                begin = end
        await asyncio.to_thread(self._write, file, rows[begin:])

    async def _put_rest(self, file: IO[bytes], row: LogLine) -> None:
        """Write the rest of a cut line, or a note of how much of it is missing."""
        missing, held = row.cut, b""
        with contextlib.suppress(Unreachable, asyncio.TimeoutError):
            async with contextlib.aclosing(read_rest(self._log, row)) as parts:
                async for part in parts:
                    missing -= len(part)
                    held += part
                    end = ansi.parted(held) if missing else len(held)
                    await asyncio.to_thread(file.write, self._form.text(held[:end].replace(b"\r", b" ")))
                    held = held[end:]
        if missing:
            self.absent.add(row.node)
        end_text = cut_text(missing + len(held)) if missing else ""
        await asyncio.to_thread(file.write, f"{end_text}\n".encode())

    def _write(self, file: IO[bytes], rows: Iterable[LogLine]) -> None:
        for row in rows:
            self.lines += 1
            if (row.generation, row.rank, row.stream, row.line) == self._wanted:
                self.at = self.lines
            file.write(self._form.line(row))


def free_name(stem: str) -> Path:
    """Return the name of a new file in the working directory."""
    path = Path.cwd() / f"{stem}.log"
    number = 2
    while path.exists():
        path, number = path.with_name(f"{stem}-{number}.log"), number + 1
    return path


# --- one record in full, such as a traceback

# A record is awaited this long, seconds.
RECORD_DEADLINE: Final = 10.0
# Lines are requested before and behind: enough for most records, then for the longest that the nodes keep together.
FEW: Final = (32, 96)
MANY: Final = (515, 512)
# Whether a line continues a record depends on this many lines before it.
CONTEXT: Final = 3


class RecordLine(NamedTuple):
    """One line of the record."""

    line: int
    offset: int
    t_ns: int
    is_late: bool
    """It arrived at that time at the latest."""
    cut: int
    """Bytes of it that are not loaded."""
    text: bytes


class RecordDetail(NamedTuple):
    """Facts about a record, and its text."""

    facts: list[str]
    text: str


def _extent(lines: Sequence[RecordLine], at: int) -> tuple[int, int]:
    """Return where the record that contains line `at` begins and ends."""
    reader = RecordReader()
    begins = [number for number, line in enumerate(lines) if reader.begins(line.text, line.t_ns)]
    return max(begin for begin in begins if begin <= at), min((b for b in begins if b > at), default=len(lines))


async def fetch_record(source: SessionSource, row: LogRow) -> RecordDetail:
    """Return the record of a line; raises SupervisorError and the errors of a broken link."""
    place = {"generation": row.generation, "rank": row.rank, "stream": row.stream}
    ahead_ns = source.ahead_ns(row.node)
    record: list[RecordLine] = []
    for before, behind in (FEW, MANY):
        first = max(0, row.line - before)
        args = {**place, "line": first, "count": row.line - first + behind}
        answer = await source.log(row.node, "log_window", args)
        lines = _lines(answer, ahead_ns)
        at = next((number for number, line in enumerate(lines) if line.line == row.line), None)
        if at is None:
            break
        begin, end = _extent(lines, at)
        record = lines[begin:end]
        is_first = first <= int(answer.data.get("first_line") or 0)
        is_last = lines[-1].line + 1 >= int(answer.data.get("total_lines") or 0)
        if (begin >= CONTEXT or is_first) and (end < len(lines) or is_last):
            break
    if not record:
        return _alone(row)
    return RecordDetail(_facts(source.job, row, record), "\n".join(ansi.plain(line.text) for line in record))


def _lines(answer: Answer, ahead_ns: int) -> list[RecordLine]:
    return [
        RecordLine(
            int(entry["line"]),
            int(entry.get("offset") or 0),
            int(entry.get("t_ns") or 0) - ahead_ns,
            bool(entry.get("t_upper")),
            int(entry.get("cut") or 0),
            text,
        )
        for entry, text in zip(answer.data.get("rows") or [], answer.body.split(b"\n"), strict=False)
    ]


def _alone(row: LogRow) -> RecordDetail:
    """Return a record of this line only, until the others are loaded."""
    return RecordDetail(
        [f"line {row.line + 1:,} of {_file(row)}", f"arrived {values.date_ns(row.t_ns, millis=True)}"],
        ansi.plain(row.text),
    )


def _facts(job: str, row: LogRow, lines: Sequence[RecordLine]) -> list[str]:
    """Return file, lines and times of a record, and how to get what is not loaded."""
    first, last = lines[0], lines[-1]
    numbers = f"line {first.line + 1:,}" if first is last else f"lines {first.line + 1:,} to {last.line + 1:,}"
    until = f" to {values.date_ns(last.t_ns, millis=True)[11:]}" if last.t_ns - first.t_ns > 10**6 else ""
    at_latest = " at the latest" if first.is_late or last.is_late else ""
    facts = [
        f"{numbers} of {_file(row)}, from byte {first.offset:,}",
        f"arrived {values.date_ns(first.t_ns, millis=True)}{until}{at_latest}",
    ]
    cut = sum(line.cut for line in lines)
    if cut:
        where = f"--rank {row.rank} --stream {row.stream} --generation {row.generation} --raw"
        facts.append(f"{count(cut, 'byte')} more on {row.node}: supervisor logs {job} {where}")
    return facts


def _file(row: LogRow) -> str:
    return f"generation_{row.generation}/rank_{row.rank}/{row.stream}.log on {row.node}"


class RecordDialog(TextDialog):
    """Facts about a record, and its text."""

    def __init__(self, source: SessionSource, row: LogRow) -> None:
        record = _alone(row)
        super().__init__(f"{row.node} rank {row.rank}  {row.stream} line {row.line + 1}", record.text)
        self._facts = record.facts
        self._source = source
        self._row = row

    def on_mount(self) -> None:
        """Request the whole record."""
        self.run_worker(self._load(), exit_on_error=False)

    async def _load(self) -> None:
        try:
            record = await asyncio.wait_for(fetch_record(self._source, self._row), RECORD_DEADLINE)
        except (SupervisorError, WireError, OSError, KeyError, TypeError, ValueError, asyncio.TimeoutError) as error:
            self._facts = [*self._facts, f"cannot load the lines around it: {why(error)}"]
        else:
            self._facts, self._text = record
        self.lay_out()

    def rows(self) -> Sequence[Row]:
        """Return the facts, then the text."""
        facts: list[Row] = [((line, "dim"),) for fact in self._facts for line in wrap(clean(fact), self.inner_width)]
        return [*facts, (), *super().rows()]


# --- the log that is shown

PROBLEMS: Final = (SupervisorError, WireError, OSError, ValueError, asyncio.TimeoutError)
# A notice has this title while another export runs.
BUSY: Final = "one at a time"


class LogExport:
    """The export of the log that is shown: one record in a dialog, all lines in a file or in the pager."""

    def __init__(self, shell: Shell, shown: ShownLog, ask: Ask, show_title: Callable[[], None]) -> None:
        self.running: Export | None = None
        self._shell = shell
        self._shown = shown
        self._view = shown.view
        self._ask = ask
        self._show_title = show_title

    def title_parts(self) -> list[tuple[int, Row]]:
        """Return the progress of the export, for the title."""
        return [] if self.running is None else [(4, ((f"{self.running.progress_text()}, esc cancels", "mark"),))]

    def cancel(self) -> bool:
        """Cancel the export; return whether there was one."""
        if self.running is None:
            return False
        self._view.workers.cancel_group(self._view, "save")
        self._shell.say("export canceled; no file was written")
        return True

    def action_detail(self) -> None:
        """Show the whole record of the line that is read."""
        row = self._shown.row_read()
        if row is not None and row.fold is not None:
            lines = (f"{each.node} r{each.rank}  {ansi.plain(each.text)}" for each in row.fold.rows)
            title = f"{count(len(row.fold.records), 'rank')} alike  {values.clock_ns(row.t_ns)}"
            self._shell.push_screen(TextDialog(title, "\n".join(lines)))
        elif row is not None:
            self._shell.push_screen(RecordDialog(self._shell.source, row))

    def _begin(self, feed: Feed, *, colour: bool) -> Export:
        row = self._shown.row_read()
        only = feed.file[2] if feed.file is not None else None
        form = LineFormat(self._view.show_time, self._view.show_source, colour)
        self.running = Export(self._shell.source, feed.selection, only, form, row.key if row is not None else None)
        return self.running

    def _end(self) -> None:
        self.running = None
        self._shell.unsay(BUSY)
        if self._shell.is_running:
            self._show_title()

    def _is_busy(self) -> bool:
        if self.running is not None:
            self._shell.say(f"{self.running.progress_text()}; esc cancels it", title=BUSY)
        return self.running is not None

    def action_save(self) -> None:
        """Ask for a file name, and write all lines of this log to the file."""
        if not self._is_busy():
            target = self._shown.target
            who = f"rank{target.rank}" if target.rank is not None else target.node or "all"
            which = f"-gen{self._shown.generation}" if self._shown.generation is not None else ""
            path = free_name(f"{self._shell.source.job}-{who}-{'-'.join(self._shown.streams)}{which}")
            self._ask.ask("save to", "a new file", self._save_to, str(path))

    def _save_to(self, text: str) -> str:
        feed, path = self._view.feed, Path(text)
        if feed is None:
            return "no log is open yet"
        try:
            path = path.expanduser()
            if path.exists():
                return "that file exists already"
            # The file gets its name when it is complete.
            file = _part(path).open("xb")
        except FileExistsError:
            return f"{_part(path)} exists already"
        except (OSError, RuntimeError, ValueError) as error:
            return f"{getattr(error, 'strerror', None) or error}"
        work = functools.partial(self._save, self._begin(feed, colour=False), file, path)
        self._view.run_worker(work, group="save")  # type: ignore[arg-type]
        return ""

    async def _save(self, export: Export, file: IO[bytes], path: Path) -> None:
        done = False
        try:
            with file:
                await export.write(file)
            if path.exists():
                raise FileExistsError(f"{path} exists by now")
            _part(path).rename(path)
            done = True
        except PROBLEMS as error:
            self._shell.say(f"{path} was not written: {why(error)}", level="error")
        finally:
            self._end()
            _part(path).unlink(missing_ok=True)
        if done:
            missing = f"; lines of {', '.join(sorted(export.absent))} may be missing" if export.absent else ""
            level: Level = "warning" if export.absent else "information"
            text = f"{count(export.lines, 'line')} in {path}{missing}"
            self._shell.say(text, title="saved", level=level, seconds=10)

    def action_pager(self) -> None:
        """Show all lines of this log in the user's pager."""
        feed = self._view.feed
        if self._is_busy() or feed is None:
            return
        try:
            command = terminal.pager()
        except LookupError as error:
            self._shell.say(str(error.args[0]), level="warning")
            return
        work = functools.partial(self._page, self._begin(feed, colour=True), command)
        self._view.run_worker(work, group="save")  # type: ignore[arg-type]

    async def _page(self, export: Export, command: list[str]) -> None:
        try:
            with tempfile.NamedTemporaryFile(prefix=f"{self._shell.source.job}-", suffix=".log") as file:
                await export.write(file)
                file.flush()
                self._end()
                place = [f"+{export.at}"] if Path(command[0]).name == "less" else []
                words = [*command, *place, file.name]
                await self._shell.lend(lambda lent: lent.run(words))
        except SuspendNotSupported:
            self._shell.say("this terminal cannot run a pager", level="warning")
        except PROBLEMS as error:
            self._shell.say(f"cannot open the pager: {why(error)}", level="error")
        finally:
            self._end()


def _part(path: Path) -> Path:
    """Return the name of a file until it is complete."""
    return path.with_name(f"{path.name}.part")

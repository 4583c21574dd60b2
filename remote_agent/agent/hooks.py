"""Hooks: run a shell line, or send a request to a web server, when something happens to the job.

In: the journal's records in order, as the coordinator makes them. Out: runs and requests, and how each went, as a
record. The next coordinator repeats only hooks whose outcome is not in the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from remote_agent.base.proc import restore_open_files
from remote_agent.base.tasks import Tasks
from remote_agent.coordinator.journal import public
from remote_agent.wire.events import ENDED_EVENTS, EventType

if TYPE_CHECKING:
    from remote_agent.wire import Hook, JobSpec
    from remote_agent.wire.documents import JournalEvent

OUTCOMES = (EventType.HOOK_DELIVERED, EventType.HOOK_FAILED)
# This many events may wait for one hook.
LONGEST_QUEUE = 64
PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
KILLED_S = 5.0
SUMMARY_CHARS = 1000
# Discord refuses longer messages.
DISCORD_CHARS = 2000
# A command line can be read by every user of the node, an environment cannot. The shell itself changes the directory:
# where a file system hangs, only the shell waits for it.
SHELL = 'cd "$1" || exit; shift; line=$SUPERVISOR_COMMAND; unset SUPERVISOR_COMMAND; eval "$line"'


def summary(record: JournalEvent) -> str:
    """Return a record's summary as one line that fits into an environment variable."""
    kind, detail = record["type"], record["detail"]
    if kind in ENDED_EVENTS:
        reason = detail.get("reason")
        text = f"the job {kind.partition('_')[2]}" + (f": {reason}" if reason else "")
    else:
        text = str(detail.get("summary") or detail.get("message") or detail.get("reason") or "")
    return " ".join(text.replace("\0", " ").split())[:SUMMARY_CHARS]


def message(kind: str, head: Mapping[str, str]) -> dict[str, object]:
    """Return what the incoming webhook of a chat takes: a line with the job, the event and its summary.

    kind: slack, discord or mattermost. A summary, which a script may have printed, mentions nobody.
    """
    text = f"supervisor {head['job']}: {head['event']}" + (f": {head['summary']}" if head["summary"] else "")
    if kind == "discord":
        return {"content": text[:DISCORD_CHARS], "allowed_mentions": {"parse": []}}
    if kind == "slack":
        return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
    # An invisible character after the sign prevents a mention.
    return {"text": text.replace("@", "@\u200b")}


class Hooks:
    """The hooks of a job; each has its own queue of events, so that a slow hook delays nothing else."""

    def __init__(self, spec: JobSpec, cwd: str, record: Callable[..., None]) -> None:
        self._spec = spec
        self._cwd = cwd
        self._record = record
        self._queues: list[asyncio.Queue[tuple[str, JournalEvent]]] = [asyncio.Queue(LONGEST_QUEUE) for _ in spec.hooks]
        self._open: dict[tuple[int, int], str] = {}
        """The events that are still to be delivered, by the numbers of the hook and of the record."""
        self._tasks = Tasks()

    def start(self, records: Iterable[JournalEvent]) -> None:
        """Begin, with what the journal has so far."""
        known = list(records)
        done = {(one["detail"]["hook"], one["detail"]["of"]) for one in known if one["type"] in OUTCOMES}
        for record in known:
            self.receive(record, done)
        for number, hook in enumerate(self._spec.hooks, 1):
            self._tasks.spawn(self._serve(number, hook), f"hook {number}")

    async def finish(self) -> None:
        """Wait for the last deliveries at the job's end: twice the longest timeout, for a failure and the end."""
        if not self._open:
            return
        joins = asyncio.gather(*(queue.join() for queue in self._queues))
        try:
            await asyncio.wait_for(joins, 2 * max(hook.timeout for hook in self._spec.hooks))
        except asyncio.TimeoutError:
            await self._tasks.close()
            for (number, of), occasion in list(self._open.items()):
                self._over(number, of, occasion, "the job ended before it was delivered")

    async def close(self) -> None:
        """End what runs."""
        await self._tasks.close()

    def receive(self, record: JournalEvent, done: Collection[tuple[int, int]] = ()) -> None:
        """Take a new record in; `done`: hook and record of what is delivered already."""
        occasion = self._occasion(record)
        for number, hook in enumerate(self._spec.hooks, 1):
            of = record["seq"]
            if occasion not in hook.on or (number, of) in done:
                continue
            self._open[number, of] = occasion
            try:
                self._queues[number - 1].put_nowait((occasion, record))
            except asyncio.QueueFull:
                self._over(number, of, occasion, f"{LONGEST_QUEUE} events are already waiting for this hook")

    def _occasion(self, record: JournalEvent) -> str:
        """Return failure, hang, slow, recovery or end; empty for any other record."""
        kind = record["type"]
        if kind == EventType.INCIDENT:
            # The final verdict follows, under the same number.
            if record["detail"].get("preliminary"):
                return ""
            return "hang" if record["detail"].get("ongoing") else "failure"
        if kind in (EventType.INCIDENT_HEALED, EventType.HANG_OVER):
            return "recovery"
        if kind == EventType.SLOW:
            return "slow"
        return "end" if kind in ENDED_EVENTS else ""

    async def _serve(self, number: int, hook: Hook) -> None:
        queue = self._queues[number - 1]
        while True:
            occasion, record = await queue.get()
            self._over(number, record["seq"], occasion, await self._deliver(number, hook, occasion, record))
            queue.task_done()

    def _over(self, number: int, of: int, occasion: str, reason: str) -> None:
        del self._open[number, of]
        if reason:
            reason = f"hook {number} ({occasion}): {reason}"
            self._record(EventType.HOOK_FAILED, hook=number, event=occasion, of=of, reason=reason)
        else:
            self._record(EventType.HOOK_DELIVERED, hook=number, event=occasion, of=of)

    async def _deliver(self, number: int, hook: Hook, occasion: str, record: JournalEvent) -> str:
        """Try until it works; returns why the last try failed, or nothing."""
        head = {"job": self._spec.job, "event": occasion, "summary": summary(record)}
        body = json.dumps(message(hook.kind, head) if hook.kind else {**head, "record": public(record)}).encode()
        name = f"supervisor hook {number} of {self._spec.job}"
        env = {f"SUPERVISOR_{key.upper()}": value for key, value in head.items()}
        reason = ""
        for tries in range(hook.retries + 1):
            if tries:
                await asyncio.sleep(min(PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S))
            reason = await (_post(hook, body, name) if hook.url else _run(hook, body, name, env, self._cwd))
            if not reason:
                break
        return reason


async def _run(hook: Hook, body: bytes, name: str, env: dict[str, str], cwd: str) -> str:
    """Run the shell line once; returns what went wrong, never its text or output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", SHELL, name, cwd),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **env, "SUPERVISOR_COMMAND": hook.command},
            start_new_session=True,
        )
    except OSError as error:
        return f"the command cannot be started: {error.strerror}"
    restore_open_files(process.pid)
    try:
        await asyncio.wait_for(process.communicate(body), hook.timeout)
    except asyncio.TimeoutError:
        return f"the command took more than {hook.timeout:g} s and was killed"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), KILLED_S)
    code = process.returncode or 0
    if code < 0:
        return f"the command was killed by signal {-code}"
    return f"the command exited with {code}" if code else ""


async def _post(hook: Hook, body: bytes, name: str) -> str:
    """Send one POST; return what went wrong, without more of the address than its host."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def settle(reason: str) -> None:
        if not answer.done():
            answer.set_result(reason)

    def work() -> None:
        reason = _request(hook, body)
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, reason)

    # This is no thread of the loop: at its end the agent would wait for a server that answers byte by byte.
    threading.Thread(target=work, name=name, daemon=True).start()
    try:
        reason = await asyncio.wait_for(answer, hook.timeout)
    except asyncio.TimeoutError:
        reason = f"no answer in {hook.timeout:g} s"
    return f"{urllib.parse.urlsplit(hook.url).hostname}: {reason}" if reason else ""


def _request(hook: Hook, body: bytes) -> str:
    # This imports half of a web client, so it is imported only if it is needed.
    import http.client
    import urllib.error
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        """Refuses to redirect: a redirected POST would arrive as a GET without the event."""

        def redirect_request(self, *args: Any) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "supervisor"}
    try:
        request = urllib.request.Request(hook.url, body, headers, method="POST")
        with urllib.request.build_opener(Stay).open(request, timeout=hook.timeout):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        return f"answered {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        # The error's text may contain the address.
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        return str(getattr(cause, "strerror", None) or type(cause).__name__)

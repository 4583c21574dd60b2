"""What one node has promised: its term and its vote, on disk before anyone else learns of them.

In: coordinators and candidates, with their terms. Out: the node's `Member` view; `term.json`, read after a restart.

`disk` tells the node from one of the same name that has forgotten its promises. A promise that cannot be written is
given all the same, as a full disk must not keep a job from going on; but first the file with `disk` is deleted, which
needs no space. After a restart the node is then another one, and no older group counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.base import clocks
from remote_agent.base.files import atomic_write, read_json
from remote_agent.base.tasks import to_the_end
from remote_agent.election import member

if TYPE_CHECKING:
    from remote_agent.coordinator.journal import Journal
    from remote_agent.election.member import Member

log = logging.getLogger(__name__)


class Ballot:
    """Keeps the node's view of the election, which changes only here."""

    def __init__(self, path: Path, view: Member) -> None:
        """Begin with the term and the vote of the last run; its lease does not count any more."""
        self._path = path
        self._written: dict[str, Any] | None = read_json(path)
        """What is on disk; None: nothing, and nothing is written any more."""
        self.view = view
        term, disk = self._written.get("term"), self._written.get("disk")
        self.disk = secrets.token_hex(8)
        if isinstance(term, int) and isinstance(disk, str):
            self.disk = disk
            self.view = dataclasses.replace(view, term=term, voted=self._written.get("voted"))
        self.former = ""
        """The last coordinator that was another node."""
        self._followed = ""
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._listeners: list[Callable[[str], None]] = []

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the coordinator's name whenever this node follows another one."""
        self._listeners.append(listener)

    def follow(self, term: int, coordinator: str) -> bool:
        """Accept a coordinator; False when its term is over."""
        self.view, accepted = member.accept(self.view, term, coordinator, clocks.now())
        if not accepted:
            return False
        if coordinator != self.view.me:
            self.former = coordinator
        # Nothing waits for this to be stored: only a vote, and a proposal on the disk, are promises.
        self._changed.set()
        if coordinator != self._followed:
            self._followed = coordinator
            for listener in self._listeners:
                listener(coordinator)
        return True

    async def keep_written(self) -> None:
        """Write the term of a coordinator that this node follows, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.save()
            except OSError as error:
                log.warning("term %d cannot be written: %s", self.view.term, error)

    async def vote(self, term: int, candidate: str, *, sounding: bool = False) -> str:
        """Give this node's vote to a candidate; returns "" or the reason for a refusal.

        A sounding only asks whether the vote would be given. A vote holds at once, and is on the disk before anyone
        else learns of it, as it must hold after a restart.
        """
        before = self.view
        view, refusal = member.vote(before, term, candidate, clocks.now())
        if refusal or sounding:
            return refusal
        self.view = view
        try:
            await self.save()
        except OSError as error:
            if self.view is view:
                self.view = before
            return f"{view.me} cannot write its vote: {error}"
        return ""

    async def secure(self, journal: Journal) -> None:
        """Make term and journal durable; raises OSError where that fails and the node cannot give up its disk either.

        With the term: a node that has recorded a proposal records nothing of an older coordinator after a restart.
        """
        await self.save()
        try:
            await journal.sync()
        except OSError as error:
            self._give_up_disk(error)

    def renew_lease(self, sent: float) -> None:
        """Note that the coordinator has answered what was sent at that time."""
        self.view = member.renew_lease(self.view, sent)

    def note_refused(self) -> None:
        """Note that nothing listens at the coordinator's address any more."""
        self.view = member.refused(self.view, clocks.now())

    def name_successor(self, node: str) -> None:
        """Note the successor that the coordinator has named; if the coordinator was this node, it no longer is."""
        mine = self.view.coordinator == self.view.me
        self.view = dataclasses.replace(self.view, successor=node, coordinator=None if mine else self.view.coordinator)

    async def save(self) -> None:
        """Write the present term and vote; raises OSError where that fails and the disk cannot be given up either."""
        async with self._writing:
            promise = {**self.view.to_json(), "disk": self.disk}
            if self._written is None or promise == self._written:
                return
            try:
                await to_the_end(asyncio.to_thread(atomic_write, self._path, json.dumps(promise).encode()))
                self._written = promise
            except OSError as error:
                self._give_up_disk(error)

    def _give_up_disk(self, error: OSError) -> None:
        if self._written is not None:
            log.warning("promises cannot be written: %s; after a restart this node counts as a new one", error)
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            self._written = None

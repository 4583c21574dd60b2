"""What an agent still knows after a restart: its term and vote, and where the other agents are.

In: a member's view, addresses. Out: term.json and members.json, read again when the agent starts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remote_agent import paths
from remote_agent.jobs import read_json

if TYPE_CHECKING:
    from remote_agent.member import Member
    from remote_agent.tasks import Tasks

log = logging.getLogger(__name__)


class Memory:
    """The files of one agent; the vote is written before anybody is told, addresses soon."""

    def __init__(self, files: paths.JobFiles, tasks: Tasks) -> None:
        self._files = files
        self._tasks = tasks
        self._term = read_json(files.term)
        self.members: dict[str, dict[str, Any]] = read_json(files.members)
        """Address and port of each agent, by node."""
        self._written = dict(self.members)
        self._writing = False

    def restore(self, view: Member) -> Member:
        """Return the view with the term and the vote of before; the lease of then is not ours any more."""
        term, voted = self._term.get("term"), self._term.get("voted")
        return dataclasses.replace(view, term=term, voted=voted) if isinstance(term, int) else view

    def keep(self, view: Member) -> None:
        """Write term and vote down, if they changed, before this returns; raises OSError."""
        term = view.to_json()
        if term != self._term:
            paths.atomic_write(self._files.term, json.dumps(term).encode())
            self._term = term

    def learn(self, members: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in where agents are."""
        self.members.update({name: dict(where) for name, where in members.items()})
        if self.members != self._written and not self._writing:
            self._writing = True
            self._tasks.spawn(self._write(), "write the members down")

    async def _write(self) -> None:
        """Write the members down until nothing new has come meanwhile; no promise hangs on it, so nobody waits."""
        try:
            while self.members != self._written:
                found = dict(self.members)
                self._written = found
                await asyncio.to_thread(paths.atomic_write, self._files.members, json.dumps(found).encode())
        except OSError as error:
            log.warning("the members are not written down: %s", error)
        finally:
            self._writing = False

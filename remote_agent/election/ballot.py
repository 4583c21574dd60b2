"""The term and the vote of one node, on disk before anyone else learns of them.

In: coordinators and candidates, with their terms. Out: the node's `Member` view; `term.json`, read after a restart.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.base import clocks
from remote_agent.base.files import atomic_write, read_json
from remote_agent.election import member

if TYPE_CHECKING:
    from remote_agent.election.member import Member

log = logging.getLogger(__name__)


class Ballot:
    """Keeps the node's view of the election, which changes only here."""

    def __init__(self, path: Path, view: Member) -> None:
        """Begin with the term and the vote of the last run; its lease does not count any more."""
        self._path = path
        self._written = read_json(path)
        self.view = view
        term = self._written.get("term")
        if isinstance(term, int):
            self.view = dataclasses.replace(view, term=term, voted=self._written.get("voted"))
        self.former = ""
        """The last coordinator that was another node."""
        self._followed = ""
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
        try:
            self._write(self.view)
        except OSError as error:
            # Only a vote is a promise: a full disk must not keep this node from following.
            log.warning("term %d cannot be written: %s", term, error)
        if coordinator != self._followed:
            self._followed = coordinator
            for listener in self._listeners:
                listener(coordinator)
        return True

    def vote(self, term: int, candidate: str, *, sounding: bool = False) -> str:
        """Give this node's vote to a candidate; returns "" or the reason for a refusal.

        A sounding only asks whether the vote would be given. A vote is written before it counts, as it must hold
        after a restart.
        """
        view, refusal = member.vote(self.view, term, candidate, clocks.now())
        if refusal or sounding:
            return refusal
        try:
            self._write(view)
        except OSError as error:
            return f"{view.me} cannot write its vote: {error}"
        self.view = view
        return ""

    def renew_lease(self, sent: float) -> None:
        """Note that the coordinator has answered what was sent at that time."""
        self.view = member.heard(self.view, sent)

    def note_refused(self) -> None:
        """Note that nothing listens at the coordinator's address any more."""
        self.view = member.refused(self.view, clocks.now())

    def name_successor(self, node: str) -> None:
        """Note whom the coordinator has named as its successor."""
        self.view = dataclasses.replace(self.view, heir=node)

    def _write(self, view: Member) -> None:
        term = view.to_json()
        if term != self._written:
            atomic_write(self._path, json.dumps(term).encode())
            self._written = term

"""Who may form a group: the rule of ARCHITECTURE.md ("Who decides"), as far as it counts.

In: the groups of a journal that may have formed; the nodes that vote, or that have a record on disk. Out: yes or no.

A node is its name and its disk: an agent that comes back without its disk has forgotten what it promised, so it is not
the node that an older group names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remote_agent.wire.events import EventType

if TYPE_CHECKING:
    from remote_agent.wire.documents import JournalEvent

Votes = Mapping[str, str]
"""The disk of each node that voted."""


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of which a journal says that it was proposed."""

    generation: int
    term: int
    members: Votes
    author: tuple[str, str] = ("", "")
    """The coordinator that proposed it, and its disk: exactly half of the members is enough with it."""
    formed: bool = False
    """Its workers may have been started: the journal continues after enough nodes had the proposal on disk."""

    def is_enough(self, votes: Votes, dead: Collection[str] = ()) -> bool:
        """Return whether these nodes are more than half of the group, or half with its author.

        `dead`: nodes that an operator declared dead; they do not count, and where all are dead, none is needed.
        """
        members = {name: disk for name, disk in self.members.items() if name not in dead}
        if not members:
            return True
        count = sum(votes.get(name) == disk for name, disk in members.items())
        name, disk = self.author
        return 2 * count > len(members) or (2 * count == len(members) and votes.get(name) == disk)

    @property
    def needed(self) -> str:
        """Return which nodes are a quorum, in words."""
        names = sorted(self.members)
        if len(names) == 1:
            return names[0]
        tie = f", or half of them with {self.author[0]}" if len(names) % 2 == 0 else ""
        return f"more than half of {' '.join(names)}{tie}"

    def to_json(self) -> dict[str, Any]:
        """Return the group as it is sent."""
        return {**dataclasses.asdict(self), "author": list(self.author)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Group:
        """Return a group that was sent; raises KeyError, TypeError, ValueError."""
        name, disk = data["author"]
        members = {str(member): str(its) for member, its in data["members"].items()}
        numbers = int(data["generation"]), int(data["term"])
        return cls(*numbers, members, (str(name), str(disk)), bool(data["formed"]))


Groups = tuple[Group, ...]
"""The newest group that has formed, then those proposed after it, oldest first; empty: the job has not begun."""


def lacking(groups: Groups, votes: Votes, dead: Collection[str] = ()) -> Group | None:
    """Return the first group of which these nodes are not a quorum; None: they may form the next one.

    Without any group, no node may.
    """
    if not groups:
        return Group(-1, 0, {"": ""})
    return next((group for group in groups if not group.is_enough(votes, dead)), None)


@dataclasses.dataclass
class Tally:
    """The votes for one candidate, counted by the groups of the newest journal among the voters: its own may be old."""

    votes: dict[str, str]
    newest: tuple[int, int]
    """Term and number of the last record of that journal."""
    groups: Groups

    def add(self, node: str, disk: str, newest: tuple[int, int], groups: Groups) -> None:
        """Count the vote of a node with such a journal."""
        self.votes[node] = disk
        if newest > self.newest:
            self.newest, self.groups = newest, groups

    def is_lost(self, waiting: Collection[str], dead: Collection[str] = ()) -> bool:
        """Return whether there is no quorum even if all of these nodes give their votes, with journals like these."""
        given = {name: group.members[name] for group in self.groups for name in waiting if name in group.members}
        return bool(self.groups) and lacking(self.groups, {**given, **self.votes}, dead) is not None

    def lacking(self, dead: Collection[str] = ()) -> Group | None:
        """Return the first group of which the voters are not a quorum; None: the candidate is elected."""
        return lacking(self.groups, self.votes, dead)


def first(node: str, disk: str) -> Groups:
    """Return the groups of a job that begins: until there is one, the node that the launch named forms it alone."""
    return (Group(-1, 0, {node: disk}, (node, disk), formed=True),)


def apply(groups: Groups, record: JournalEvent) -> Groups:
    """Return the groups after one more record of the journal."""
    kind = record["type"]
    if kind == EventType.JOB_STARTED:
        detail = record["detail"]
        return first(str(detail.get("coordinator", "")), str(detail.get("disk", "")))
    if kind == EventType.GENERATION_PROPOSED:
        detail, term = record["detail"], int(record["term"])
        author = str(record["node"]), str(detail["disk"])
        return (*groups, Group(record["generation"], term, dict(detail["members"]), author))
    if kind not in (EventType.GENERATION_STARTED, EventType.GENERATION_STOPPED) or not groups or groups[-1].formed:
        return groups
    if kind == EventType.GENERATION_STARTED:
        return (dataclasses.replace(groups[-1], formed=True),)
    return without(groups, record["generation"], int(record["term"]))


def without(groups: Groups, generation: int, term: int) -> Groups:
    """Return the groups without one that its author gave up before it started: nobody else could have started it."""
    newest = groups[-1]
    gave_up = not newest.formed and (newest.generation, newest.term) == (generation, term)
    return groups[:-1] if gave_up else groups


def in_journal(records: Sequence[JournalEvent]) -> Groups:
    """Return the groups of a whole journal."""
    at = len(records) - 1
    while at >= 0 and records[at]["type"] != EventType.GENERATION_STARTED:
        at -= 1
    generation = records[at]["generation"] if at >= 0 else None
    while at >= 0 and (records[at]["type"] != EventType.GENERATION_PROPOSED or records[at]["generation"] != generation):
        at -= 1
    groups: Groups = ()
    for record in records[max(0, at) :]:
        groups = apply(groups, record)
    return groups

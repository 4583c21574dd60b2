"""A client and hosts that fall silent: whose status is followed, what verbs wait for, and who repairs the job."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.agent.requests import essence, steps_of
from remote_agent.wire import Answer, CallFailed, ChannelClosed, NodeSpec
from remote_agent.wire.frames import encode
from remote_agent.wire.status_pieces import PIECE_NODES, joined, pieces
from supervisor.cli import logs, options, report, snapshots, stacks
from supervisor.control import admission, heal, promotion, requests
from supervisor.errors import HostError, RequestFailed, Unreachable
from supervisor.inventory import Inventory, JobDefaults
from supervisor.link import host_link, updates
from supervisor.logs.reader import follow
from supervisor.logs.selection import Selection
from supervisor.session import Session
from supervisor.ssh.answers import HostChannel
from supervisor.wording.events import EventRows
from tests.fast import waiting


class SilentLink:
    """A link to a host whose power fails after one status: nothing comes, and nothing ends; or to one that is there."""

    def __init__(self, name: str, asked: list[str], *, is_there: bool = False) -> None:
        self._is_there = is_there
        self.view = SimpleNamespace(name=name)
        self.opened = True
        self._asked = asked

    def rank_as_source(self) -> tuple[int, int]:
        return (1, 0)

    def learn(self, identity: object) -> None:
        pass

    def reopen(self) -> None:
        self.opened = False

    async def call(self, op: str, *, timeout_s: float) -> Answer:
        self._asked.append(f"{self.view.name} {op}")
        if self._is_there:
            return Answer({})
        await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
        raise AssertionError

    async def stream(self, op: str, args: object = None) -> AsyncGenerator[Answer, None]:
        self._asked.append(f"{self.view.name} {op}")
        if op == "watch":
            yield Answer({"status": {"from": self.view.name}})
        await asyncio.Event().wait()


async def test_the_one_host_that_answers_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "SILENCE", 0.05)
    monkeypatch.setattr(updates, "REST", 0.0)
    asked: list[str] = []
    seen: list[str] = []
    links = [SilentLink("n1", asked), SilentLink("n2", asked), SilentLink("n3", asked, is_there=True)]
    both = asyncio.Event()

    def set_status(status: dict[str, Any]) -> None:
        seen.append(status["from"])
        if len(seen) == 2:
            both.set()

    hub: Any = SimpleNamespace(
        opened_links=lambda: [link for link in links if link.opened],
        launching=False, events=[], state="running", ended=False, status={},
        set_status=set_status, confirm_status=lambda: None,
    )  # fmt: skip
    following = asyncio.ensure_future(updates.Updates(hub).run())
    await asyncio.wait_for(both.wait(), 60)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert seen == ["n1", "n3"]
    identities = ["n1 identity", "n2 identity", "n3 identity"]
    assert sorted(asked) == sorted(["n1 events", "n1 watch", *identities, "n3 events", "n3 watch"])


async def test_while_nodes_are_lost_the_others_are_asked_whom_they_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator on the smaller side of a split network answers for as long as it lasts."""
    monkeypatch.setattr(updates, "SILENCE", 0.01)
    monkeypatch.setattr(updates, "REST", 0.0)
    asked: list[str] = []
    lost = {"nodes": [{"name": "n1", "state": "running"}, {"name": "n2", "state": "lost"}]}
    first, second = SilentLink("n1", asked, is_there=True), SilentLink("n2", asked, is_there=True)
    links = [first]
    turned = asyncio.Event()

    def set_status(status: dict[str, Any]) -> None:
        if status["from"] == "n2":
            turned.set()

    async def identities() -> None:
        links.insert(0, second)
        second.rank_as_source = lambda: (2, 0)  # type: ignore[method-assign]

    hub: Any = SimpleNamespace(
        opened_links=lambda: links, launching=False, events=[], state="degraded", ended=False, status=lost,
        set_status=set_status, confirm_status=lambda: None,
        identities=identities,
    )  # fmt: skip
    following = asyncio.ensure_future(updates.Updates(hub).run())
    await asyncio.wait_for(turned.wait(), 60)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert asked.index("n1 watch") < asked.index("n2 watch")


class JournalLink(SilentLink):
    """A link to an agent with that journal, which waits at its end."""

    def __init__(self, name: str, asked: list[str], types: list[str]) -> None:
        super().__init__(name, asked, is_there=True)
        place = {"time": name, "generation": 0, "node": "n1", "rank": None, "detail": {}}
        self.journal = [{**place, "seq": number, "type": kind} for number, kind in enumerate(types, start=1)]
        self.all_sent = asyncio.Event()

    async def call(self, op: str, *, timeout_s: float = 0.0) -> Answer:
        return Answer({})

    async def stream(self, op: str, args: Any = None) -> AsyncGenerator[Answer, None]:
        if op == "events":
            for event in self.journal[args["since"] :]:
                yield Answer({"event": dict(event)})
            self.all_sent.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "second",
    [
        ["job_started", "generation_proposed", "coordinator_changed", "job_degraded", "job_succeeded"],
        ["job_started", "coordinator_changed", "job_succeeded"],
    ],
    ids=["longer", "as long"],
)
async def test_a_lost_end_of_a_journal_is_replaced(second: list[str]) -> None:
    """Whoever follows has at the end the events of the agent that lives, whatever it was told before."""
    asked: list[str] = []
    lost = JournalLink("n1", asked, ["job_started", "generation_proposed", "generation_running"])
    lives = JournalLink("n2", asked, second)
    lives.journal[0] = lost.journal[0]
    hub: Any = Session(Inventory(Path("hosts.toml"), (), JobDefaults(workdir=Path())))
    rows, read = EventRows(), [0]
    hub.opened_links = lambda: [lost if lost.opened else lives]
    following = asyncio.ensure_future(updates.Updates(hub).run())
    await asyncio.wait_for(lost.all_sent.wait(), 60)
    read[0] = len(rows.follow(hub.events))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    lost.opened = False
    await asyncio.wait_for(updates.Updates(hub).run(), 60)
    assert hub.events == lives.journal
    assert read == [3]
    # What is new to a reader is what replaced the end: the part that is the same is not told again.
    assert rows.follow(hub.events) == lives.journal[1:]
    assert rows.rows == lives.journal


async def test_a_journal_with_a_gap_is_not_believed() -> None:
    """What a node leaves out would be missing on the screen for good."""
    odd = JournalLink("n1", [], ["job_started", "generation_proposed", "job_succeeded"])
    del odd.journal[1]
    whole = JournalLink("n2", [], ["job_started", "generation_proposed", "job_succeeded"])
    whole.journal[0] = odd.journal[0]
    hub: Any = Session(Inventory(Path("hosts.toml"), (), JobDefaults(workdir=Path())))
    hub.opened_links = lambda: [odd if odd.opened else whole]

    async def refuses(op: str, *, timeout_s: float = 0.0) -> Answer:
        raise ChannelClosed("nothing")

    odd.call = refuses  # type: ignore[method-assign]
    await asyncio.wait_for(updates.Updates(hub).run(), 60)
    assert hub.events == whole.journal


def test_a_status_from_before_this_machine_slept_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock stands still meanwhile, on Linux as on a Mac."""
    hub: Any = Session(Inventory(Path("hosts.toml"), (), JobDefaults(workdir=Path())))
    hub.set_status({"state": "running"})
    assert hub.status_age_s < 60
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 3600)
    assert hub.status_age_s >= 3600


@pytest.mark.parametrize("state", ["stopped", "running"])
async def test_an_end_counts_once_the_best_source_has_it_too(state: str) -> None:
    """Hosts that the coordinator no longer reached may continue; else nobody waits for more, as the agents wait."""
    over = JournalLink("n1", [], ["job_started", "job_stopped"])
    best = JournalLink("n2", [], ["job_started", "coordinator_changed"])
    best.journal[0] = over.journal[0]
    best.rank_as_source = lambda: (2, 0)  # type: ignore[method-assign]
    hub: Any = Session(Inventory(Path("hosts.toml"), (), JobDefaults(workdir=Path())))
    hub.opened_links = lambda: [best, over] if hub.events else [over]

    async def call(op: str, *, timeout_s: float = 0.0) -> Answer:
        return Answer({"state": state})

    best.call = call  # type: ignore[method-assign]
    following = asyncio.ensure_future(updates.Updates(hub).run())
    waiting = asyncio.ensure_future(best.all_sent.wait())
    await asyncio.wait((following, waiting), timeout=60, return_when=asyncio.FIRST_COMPLETED)
    for task in (following, waiting):
        task.cancel()
    await asyncio.gather(following, waiting, return_exceptions=True)
    assert hub.ended == (state == "stopped")
    assert hub.events == (over.journal if state == "stopped" else best.journal)


class FilesLink(SilentLink):
    """A link to the files of a dead agent: one status, which takes a moment, and a journal that ends at once."""

    async def stream(self, op: str, args: object = None) -> AsyncGenerator[Answer, None]:
        if op == "watch":
            await asyncio.sleep(0.05)
            yield Answer({"status": {"state": "degraded"}})


async def test_a_status_that_comes_after_the_end_of_the_journal_is_taken() -> None:
    """Without it nobody knows which agents the job needs, and none is restarted."""
    hub: Any = Session(Inventory(Path("hosts.toml"), (), JobDefaults(workdir=Path())))
    hub.opened_links = lambda: [FilesLink("n1", [], is_there=True)]
    following = asyncio.ensure_future(updates.Updates(hub).run())
    await hub.wait_until(lambda: bool(hub.status), 10)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert hub.status == {"state": "degraded"}


def test_a_large_status_comes_in_pieces_and_its_steps_apart() -> None:
    rank = {"rank": 0, "state": "running", "step": 5, "last_output_age_s": 1.0, "progress": {"loss": 0.5, "lag": 0}}
    nodes = [
        {"name": f"n{number}", "state": "running", "reason": None, "group_rank": number,
         "ranks": [{**rank, "rank": number}]}
        for number in range(PIECE_NODES + 3)
    ]  # fmt: skip
    whole: Any = {"job": "j", "state": "running", "generation": 2, "nodes": nodes}
    first, second = pieces(whole)
    assert (first["more"], second["more"]) == (True, False)
    assert joined([first, second]) == whole
    empty: Any = {**whole, "nodes": []}
    assert [piece["more"] for piece in pieces(empty)] == [False]
    later = copy.deepcopy(whole)
    later["nodes"][7]["ranks"][0].update(step=9, last_output_age_s=0.1, progress={"loss": 0.5, "lag": 2})
    assert essence(later) == essence(whole)
    assert updates.with_steps(whole, 2, steps_of(later)) == later
    # Steps of another group say nothing about this one.
    assert updates.with_steps(whole, 3, steps_of(later)) == whole
    later["nodes"][7]["ranks"][0]["state"] = "failed"
    assert essence(later) != essence(whole)


def test_a_status_of_a_host_that_is_gone_stands_for_less_than_ten_seconds() -> None:
    assert 2 * updates.SILENCE + updates.REST < 10


# A verb while the job has no coordinator, or the node is leaving: it waits; every other refusal is told at once.


class OneAgent:
    """A hub with one agent, which answers with these refusals first."""

    read_only = follows = launching = opened = ended = False
    attach = None
    operator, state = "somebody", "running"

    def __init__(self, refusals: list[str]) -> None:
        self.refusals = list(refusals)
        self.status: Any = {"generation": 4}
        self.events: list[Any] = []
        self.notices: list[str] = []
        self.view = SimpleNamespace(name="n1", identity={"role": "member", "coordinator_reachable": True}, live=True)
        self.links = {"n1": self}

    def opened_links(self, live: bool | None = None) -> list[OneAgent]:
        return [self]

    async def call(self, op: str, args: Any, *, timeout_s: float) -> Answer:
        if self.refusals:
            kind = self.refusals.pop(0)
            raise CallFailed(kind, f"it is {kind}", "")
        return Answer({"accepted": True, "message": op, "generation": 4, "seq": 1})

    async def settle(self, nodes: list[str]) -> None:
        """All have answered."""

    async def reach(self) -> None:
        """All are connected to."""

    async def until_current(self) -> None:
        """There is nothing more to hear."""

    def unreachable(self, last: str, hint: str = "") -> Unreachable:
        return Unreachable(last, hint)

    async def wait_change(self, timeout_s: float) -> int:
        await asyncio.sleep(0)
        return 0

    def notice(self, text: str, level: str) -> None:
        self.notices.append(text)


def cordon(hub: Any) -> Any:
    return asyncio.run(requests.request(hub, "cordon", {"node": "n1"}))


def test_a_verb_waits_for_the_next_coordinator_and_says_so_once() -> None:
    hub = OneAgent(["no_coordinator", "not_coordinator", "no_coordinator", "moved"])
    assert cordon(hub)["accepted"]
    assert hub.notices == ["cordon waits for a coordinator, up to 25 s: it is no_coordinator"]


def test_a_verb_that_finds_no_coordinator_in_time_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "VERB_DEADLINE", 0.0)
    with pytest.raises(RequestFailed, match="it is no_coordinator"):
        cordon(OneAgent(["no_coordinator"] * 1000))


class Files(OneAgent):
    """A hub whose only agent has died; an agent that is started there answers."""

    def __init__(self) -> None:
        super().__init__([])
        self.status["nodes"] = [{"name": "n1", "state": "running"}]
        self.view.live, self.opened, self.opened_at = False, True, 0.0

    def opened_links(self, live: bool | None = None) -> list[OneAgent]:
        return [self] if live in (None, self.view.live) else []

    def reopen(self) -> None:
        self.opened_at = time.monotonic()

    async def wait_until(self, *_: object) -> None:
        """It is connected at once."""

    async def try_call(self, op: str, *_: object, **__: object) -> Any:
        return {"state": "degraded"}

    def own(self, work: Any, name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

    def notice(self, text: str, level: str, node: str = "") -> None:
        self.notices.append(text)


def test_a_verb_starts_the_agents_of_a_job_that_has_none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop` ends a job whose agents were all killed; nobody has to attach for that, which would continue it."""
    hub: Any = Files()

    async def start(_hub: object, name: str, *, full: bool) -> None:
        hub.view.live = True

    async def nothing(*_: object) -> None:
        """All are introduced, and have a coordinator."""

    monkeypatch.setattr(heal, "bring_up_again", start)
    monkeypatch.setattr(heal.Healer, "_exchange", nothing)
    monkeypatch.setattr(promotion, "promote_to_stop", nothing)
    assert asyncio.run(requests.request(hub, "stop", {"kill": False}))["accepted"]
    assert hub.notices == ["n1: agent lost; restarting it", "n1: agent restarted"]
    # An operator who is attached has a healer that does it.
    hub.view.live, hub.attach = False, "control"
    with pytest.raises(Unreachable):
        asyncio.run(requests.request(hub, "stop", {"kill": False}))


def test_any_other_refusal_is_the_answer() -> None:
    hub = OneAgent(["cordoned"])
    with pytest.raises(RequestFailed, match="it is cordoned"):
        cordon(hub)
    assert hub.notices == []


def test_a_node_that_is_being_removed_is_added_once_it_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent ends with the removal: it is started again before the coordinator is asked again."""
    started = []

    async def start(_hub: object, name: str, *, full: bool) -> Any:
        started.append(name)
        return NodeSpec(name, "10.0.0.9")

    monkeypatch.setattr(heal, "bring_up_again", start)
    hub: Any = OneAgent(["leaving", "leaving"])
    hub.status["nodes"] = [{"name": "n1", "state": "draining"}]
    assert asyncio.run(requests.request(hub, "add", {"node": "n1"}))["generation"] == 4
    assert started == ["n1", "n1", "n1"]


# The repair of a job while an operator is attached, and the tasks that do it; the hosts are made up.


WAIT_S = 30.0


class Dead:
    """A link that has found no agent on its host."""

    def __init__(self, name: str) -> None:
        self.view = SimpleNamespace(name=name, live=False)
        self.opened = True
        self.opened_at = 0.0
        self.missing, self.asked_at = False, 0.0

    def reopen(self) -> None:
        self.opened_at = time.monotonic()

    def ask_again(self) -> None:
        """The host knows the job."""

    async def try_call(self, op: str, *, timeout_s: float) -> dict[str, Any]:
        return {"state": "running"}


class Silent(Dead):
    """One whose host does not answer any more; the next host is found without an agent only then."""

    def __init__(self, name: str, later: Dead) -> None:
        super().__init__(name)
        self._later = later
        later.opened = False

    async def try_call(self, op: str, *, timeout_s: float) -> dict[str, Any]:
        self._later.opened = True
        await asyncio.get_running_loop().create_future()
        return {}


def test_a_host_that_does_not_answer_does_not_delay_the_repair_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Dead("n2")
    first = Silent("n1", second)
    nodes = [{"name": name, "state": "lost"} for name in ("n1", "n2")]

    async def nothing(*_: object) -> None:
        """There is nothing else to repair."""

    async def scenario() -> list[str]:
        restarted: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

        async def start(_hub: object, name: str, *, full: bool) -> None:
            second.view.live = True
            restarted.set_result([name])

        monkeypatch.setattr(heal, "bring_up_again", start)
        tasks: list[asyncio.Task[None]] = []

        def own(work: Any, name: str) -> asyncio.Task[None]:
            tasks.append(asyncio.get_running_loop().create_task(work, name=name))
            return tasks[-1]

        hub: Any = SimpleNamespace(
            launching=False, failure=None, attach="control", read_only=False, ended=False, state="degraded",
            status={"nodes": nodes}, links={"n1": first, "n2": second}, notice=lambda *_: None, own=own,
            opened_links=lambda live: [], wait_until=nothing, spared=(),
        )  # fmt: skip
        healer = asyncio.get_running_loop().create_task(heal.Healer(hub).run())
        try:
            return await asyncio.wait_for(restarted, WAIT_S)
        finally:
            for task in (healer, *tasks):
                task.cancel()

    monkeypatch.setattr(heal, "INTERVAL", 0.0)
    monkeypatch.setattr(heal, "SETTLE", -1.0)
    monkeypatch.setattr(admission, "spread", nothing)
    monkeypatch.setattr(promotion, "promote_if_orphaned", nothing)
    assert asyncio.run(scenario()) == ["n2"]


def test_an_agent_that_hears_late_is_asked_to_end_again() -> None:
    """It was stopped or cut off: until it has joined the coordinator, it counts itself as part of the job."""
    answers: list[dict[str, Any] | None] = [None, None, {}]

    async def ask(op: str, *, timeout_s: float) -> dict[str, Any] | None:
        assert op == "exit"
        return answers.pop(0)

    async def wait(seconds: float) -> None:
        await asyncio.sleep(0)

    link: Any = SimpleNamespace(opened=True, view=SimpleNamespace(live=True), try_call=ask)
    asyncio.run(heal._end_leaving(SimpleNamespace(wait_change=wait), link))  # type: ignore[arg-type]
    assert answers == []


@pytest.mark.parametrize("joining", [True, False])
def test_a_new_agent_is_not_taken_for_the_one_that_left(joining: bool) -> None:
    async def ask(op: str, *, timeout_s: float) -> dict[str, Any]:
        assert op == "identity"
        return {"joining": joining}

    async def call(op: str) -> dict[str, Any]:
        return {"nodes": [{"name": "n3", "state": "removed"}]}

    link: Any = SimpleNamespace(opened=True, view=SimpleNamespace(live=True, name="n3"), try_call=ask)
    assert asyncio.run(heal._is_leaving(SimpleNamespace(call=call), link)) is not joining  # type: ignore[arg-type]


# Commands beside hosts that fall silent: they end soon, with what the others have, and name the silent ones.


DEADLINE = 30.0
FILE = {"generation": 0, "rank": 0, "stream": "stdout", "size": 6}
JOB = {
    "job": "a", "node": "n1", "live": True, "state": "running", "created_ns": 1, "generation": 0, "world_size": 3,
    "tree": None, "script": None, "updated_ns": None, "warm_until_ns": None, "agent_pid": None,
}  # fmt: skip
STATUS: dict[str, Any] = {
    "job": "a", "state": "running", "generation": 0, "restarts": 0, "max_restarts": 3, "world_size": 3,
    "coordinator": "n1", "started_at": "2026-01-01T00:00:00.000Z", "nodes": [], "last_seq": 1,
}  # fmt: skip
WINDOW = {
    "looks": 40, "phases": {"forward": [9.0, 9.0]}, "disk_s": 0.0, "delay_s": 0.0, "throttled_s": 0.0, "faults": 0,
    "cuda": False, "taken": None, "sites": [], "links": [],
}  # fmt: skip
EVENT = {
    "seq": 1, "type": "generation_running", "generation": 0, "time": "2026-01-01T00:00:00.000Z", "node": None,
    "rank": None, "detail": {},
}  # fmt: skip


class Node:
    """A connection to a host; `stops`: it answers nothing after it has opened the job; `refuses`: a request.

    Or `refuses` is "slow": its files take 25 s to list; "large": the list itself is on its way for so long.
    """

    opened = SimpleNamespace(refused=None)

    def __init__(self, name: str, *, stops: bool, refuses: str) -> None:
        self.host, self.hello = SimpleNamespace(name=name), dict[str, Any]()
        self.closed = asyncio.Event()
        self.channel = self
        self.heard_at = 0.0
        self._answering: asyncio.Future[None] | None = None
        self._stops, self._refuses, self._silent = stops, refuses, False

    async def call(
        self, op: str, args: dict[str, Any] | None = None, body: bytes = b"", timeout: float = 30.0
    ) -> Answer:
        if self._silent:
            ended = asyncio.ensure_future(self.closed.wait())
            await asyncio.wait((ended,), timeout=timeout)
            if not ended.done():
                ended.cancel()
                raise asyncio.TimeoutError
            raise ChannelClosed("closed")
        self._silent = op == "identity" and self._stops
        if op == "log_list" and self._refuses in ("slow", "large"):
            self._answering = asyncio.ensure_future(self._answer_for(25))
            await self._answering
        elif self._refuses == "large" and self._answering is not None and not self._answering.done():
            # Whatever else is asked comes behind the large answer.
            await asyncio.wait_for(asyncio.shield(self._answering), timeout)
        return self._answer(op)

    async def _answer_for(self, seconds: int) -> None:
        for _ in range(seconds):
            await asyncio.sleep(1)
            self.heard_at = asyncio.get_running_loop().time() if self._refuses == "large" else 0.0

    def _answer(self, op: str) -> Answer:
        if op == self._refuses:
            raise CallFailed("usage", f"{op}: unknown argument 'level'", "")
        name, rank = self.host.name, int(self.host.name[1:]) - 1
        row = {"generation": 0, "rank": rank, "stream": "stdout", "line": 0, "offset": 0, "t_ns": rank + 1}
        # The coordinator is asked first.
        role = "coordinator" if name == "n1" else "member"
        merged = {"rows": [], "more": False, "since_ns": 0, "until_ns": 9}
        data: dict[str, Any] = {
            "jobs": {"jobs": [JOB]}, "open": {"node": name},
            "identity": {"live": True, "role": role, "coordinator_reachable": True, "term": 1, "last_seq": 1},
            "status": STATUS, "incidents": {"incidents": [], "nccl": None},
            "log_list": {"files": [{**FILE, "rank": rank}]}, "log_merged": merged, "log_rows": {"rows": [row]},
            "events": {"event": EVENT}, "await_engine": {},
            "stacks": {"stacks": {str(rank): f"of {name}"}, "unreachable": {}},
            "why": {"generation": 0, "windows": {str(number): {str(rank): WINDOW} for number in (1, 2)}, "off": {}},
        }  # fmt: skip
        return Answer(data[op], f"from {name}".encode() if op == "log_rows" else b"")

    async def stream(self, op: str, args: dict[str, Any] | None = None) -> AsyncGenerator[Answer, None]:
        yield await self.call(op, args, timeout=1000.0)

    async def close(self) -> None:
        self.closed.set()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, list[float]]]:
    """Return a function that makes hosts n1, n2 …, each "", "absent", "stops", or a request that it refuses."""

    def made(*kinds: str) -> tuple[Path, list[float]]:
        path, took = tmp_path / "hosts.toml", list[float]()
        path.write_text("".join(f'[[hosts]]\nname = "n{number}"\nssh = "n{number}"\naddress = "10.0.0.{number}"\n'
                                for number in range(1, len(kinds) + 1)))  # fmt: skip
        by_name = {f"n{number}": kind for number, kind in enumerate(kinds, 1)}

        async def connect(host: Any, *, deadline_s: float, **_: Any) -> Node:
            kind = by_name[host.name]
            if kind == "absent":
                await asyncio.sleep(deadline_s)
                raise HostError(host.name, "connect", f"timeout: no answer within {deadline_s:.0f} s")
            return Node(host.name, stops=kind == "stops", refuses="" if kind == "stops" else kind)

        def run(coroutine: Any) -> Any:
            async def timed() -> Any:
                loop = asyncio.get_running_loop()
                with monkeypatch.context() as patch:
                    patch.setattr(time, "monotonic", loop.time)
                    try:
                        return await coroutine
                    finally:
                        took.append(loop.time())

            return waiting.run(timed(), 300)

        monkeypatch.setattr(host_link, "connect", connect)
        for module in (logs, options):
            monkeypatch.setattr(module.asyncio, "run", run)
        return path, took

    return made


Hosts = Callable[..., tuple[Path, list[float]]]


@pytest.mark.parametrize("first", ["stops", ""], ids=["coordinator", "another node"])
@pytest.mark.parametrize("argument", ["", "--tail=9"])
def test_logs_of_the_hosts_that_answer(hosts: Hosts, capfd: Any, first: str, argument: str) -> None:
    """n4 accepts the connection and is then silent; two others stop answering when the job is open."""
    path, took = hosts(first, "", "stops", "absent")
    logs.run("logs", [str(path), "a", *filter(None, [argument])])
    out, said = capfd.readouterr()
    shown = ["n1", "n2"] if not first else ["n2"]
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == shown
    named = sorted(line.split()[1] for line in said.splitlines())
    assert named == [f"{name}:" for name in ("n1", "n2", "n3", "n4") if name not in shown], said
    assert took[0] < DEADLINE


@pytest.mark.parametrize("first", ["stops", ""], ids=["coordinator", "another node"])
def test_a_report_ends_soon(hosts: Hosts, capfd: Any, first: str) -> None:
    path, took = hosts(first, "", "stops", "absent")
    report.run("report", [str(path), "a", "--json"])
    out, said = capfd.readouterr()
    assert json.loads(out)["job"] == "a"
    assert sorted(line.split()[1] for line in said.splitlines()) == [*(["n1:"] if first else []), "n3:", "n4:"]
    assert took[0] < DEADLINE


def test_hosts_that_stop_answering_together_are_waited_for_together(hosts: Hosts, capfd: Any) -> None:
    path, took = hosts("stops", "stops", "stops", "stops", "stops", "")
    snapshots.run("snapshots", [str(path), "a", "--json"])
    out, said = capfd.readouterr()
    assert json.loads(out) == {"job": "a", "snapshots": []}
    assert len(said.splitlines()) == 5
    assert took[0] < DEADLINE


def test_stacks_of_the_only_live_job(hosts: Hosts, capfd: Any) -> None:
    path, took = hosts("", "stops", "absent")
    stacks.run("stacks", [str(path), "--json"])
    out, said = capfd.readouterr()
    assert json.loads(out)["stacks"] == {"0": "of n1"}
    assert "supervisor: n2: no answer for 8 s; its data is not shown\n" in said
    assert sorted(line.split()[1] for line in said.splitlines()) == ["n2:", "n3:"]
    assert took[0] < DEADLINE


def test_why_is_asked_of_all_and_shows_the_ranks_that_are_named(
    hosts: Hosts, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes: Any = [{"name": f"n{rank + 1}", "ranks": [{"rank": rank, "state": "running"}]} for rank in range(2)]
    monkeypatch.setitem(STATUS, "nodes", nodes)
    path, _ = hosts("", "")
    assert stacks.run_why("why", [str(path), "--rank", "1", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["ranks"].keys(), shown["ranks"]["1"]["node"], shown["off"]) == ({"1"}, "n2", {})
    for run in (stacks.run_why, stacks.run):
        with pytest.raises(RequestFailed, match="job a has no rank 7") as refused:
            run("why", [str(path), "--rank", "1,7"])
        assert refused.value.hint == "its ranks: 0-1"
    monkeypatch.setitem(nodes[1]["ranks"][0], "state", "exited")
    with pytest.raises(RequestFailed, match="no live rank of those"):
        stacks.run_why("why", [str(path), "--rank", "1"])


def test_where_no_host_answers_any_more_that_is_the_error(hosts: Hosts) -> None:
    path, took = hosts("stops", "stops", "absent")
    with pytest.raises(Unreachable, match=r"n1: link: no answer for 8 s"):
        logs.run("logs", [str(path), "a"])
    assert took[0] < DEADLINE


@pytest.mark.parametrize("op", ["log_list", "log_rows"])
def test_a_node_that_refuses_a_request_that_others_answer_is_named(hosts: Hosts, capfd: Any, op: str) -> None:
    path, _ = hosts("", op, "")
    logs.run("logs", [str(path), "a"])
    out, said = capfd.readouterr()
    shown = [line.rpartition(" ")[2] for line in out.splitlines()]
    # Who does not say which files it has may still send their rows.
    assert shown == (["n1", "n3"] if op == "log_rows" else ["n1", "n2", "n3"])
    assert said == f"supervisor: n2: {op}: unknown argument 'level'; its data is not shown\n"


def test_what_every_node_refuses_is_the_users_error(hosts: Hosts) -> None:
    path, _ = hosts("log_rows", "log_rows")
    with pytest.raises(RequestFailed, match="unknown argument") as refused:
        logs.run("logs", [str(path), "a"])
    assert refused.value.kind == "usage"


@pytest.mark.parametrize("kind", ["slow", "large"])
def test_a_host_that_is_there_is_waited_for(hosts: Hosts, capfd: Any, kind: str) -> None:
    path, took = hosts("", kind)
    logs.run("logs", [str(path), "a"])
    out, said = capfd.readouterr()
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == ["n1", "n2"]
    assert (said, took[0] >= 25) == ("", True)


def test_a_frame_that_is_still_arriving_is_heard() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=2**20)
        channel = HostChannel("n1", reader, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]
        running = asyncio.ensure_future(channel.run())
        whole = encode({"re": 1, "ok": {}}, b"x" * 300_000)
        heard = []
        for part in (whole[:100_000], whole[100_000:200_000]):
            await asyncio.sleep(1)
            at = loop.time()
            reader.feed_data(part)
            await asyncio.sleep(1)
            heard.append(channel.heard_at == at)
        assert heard == [True, True]
        reader.feed_eof()
        await running

    waiting.run(scenario(), 60)


def two_links(refuses: Sequence[str] = (), **facts: Any) -> Any:
    """A hub with n1 and n2, whose logs can be followed unless they refuse."""

    def link(name: str) -> Any:
        async def stream(_op: str, _args: Any) -> AsyncGenerator[Answer, None]:
            if name in refuses:
                raise CallFailed("usage", "unknown argument", "")
            yield Answer({"generation": 0, "rank": 0, "stream": "stdout", "offset": 0}, name.encode())

        return SimpleNamespace(
            view=SimpleNamespace(name=name), active=True, opened=True, opened_at=1.0, is_malformed=False,
            can_be_asked=True, reached_at=1.0, through=None, connect=lambda: None, stream=stream,
        )  # fmt: skip

    links, left_out = {name: link(name) for name in ("n1", "n2")}, set[str]()
    hub = SimpleNamespace(links=links, follows=True, left_out=left_out, **facts)
    hub.leave_out = lambda name, _reason: left_out.add(name)
    return hub


async def followed(hub: Any) -> list[bytes]:
    return [chunk.data async for chunk in follow(hub, Selection())]


def test_a_node_that_refuses_to_be_followed_ends_no_others_log() -> None:
    hub = two_links(["n2"], ended=True, state="succeeded")
    assert waiting.run(followed(hub), 60) == [b"n1"]
    assert hub.left_out == {"n2"}
    with pytest.raises(RequestFailed, match="unknown argument"):
        waiting.run(followed(two_links(["n1", "n2"], ended=True, state="succeeded")), 60)

"""A job on hundreds of hosts: a few connections are enough to see all of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.wire import Answer, CallFailed, ChannelClosed, Items
from supervisor.cli import main
from supervisor.errors import Unreachable
from supervisor.inventory import Host, Inventory, JobDefaults
from supervisor.link import host_link
from supervisor.logs.files import files, hosts_of
from supervisor.session import Session
from supervisor.ssh import HostError
from supervisor.ssh.answers import read_answer
from supervisor.ssh.reasons import NeedsAnswer
from tests.fast import waiting

COUNT = 200


@dataclasses.dataclass
class Cluster:
    """A job with a rank on each of many hosts, as their connections show it."""

    absent: set[str] = dataclasses.field(default_factory=set)
    """Hosts to which no connection can be made."""
    strange: set[str] = dataclasses.field(default_factory=set)
    """Hosts that do not know the job."""
    lost: set[str] = dataclasses.field(default_factory=set)
    ended: bool = False
    connected: list[str] = dataclasses.field(default_factory=list)
    asked: Counter[str] = dataclasses.field(default_factory=Counter)
    """Requests by host and kind, of those that were passed on with the host between."""
    malformed: str = ""
    asking: str = ""
    """A host for which ssh asks the user, who does not answer."""
    questions: list[bool] = dataclasses.field(default_factory=list)
    """For each attempt to connect to that host, whether the user might be asked."""

    async def connect(self, host: Any, *, may_ask: bool, **_: Any) -> Node:
        self.connected.append(host.name)
        if host.name == self.asking:
            self.questions.append(may_ask)
        await asyncio.sleep(0.1)
        if host.name == self.asking:
            raise NeedsAnswer(host.name, "auth", "ssh asks")
        if host.name in self.absent:
            raise HostError(host.name, "connect", "the gateway is closed")
        return Node(self, host.name)

    def session(self, count: int = COUNT, job: str | None = "a", **options: Any) -> Session:
        hosts = tuple(Host(f"n{number}", ssh=f"n{number}", address=f"n{number}") for number in range(1, count + 1))
        return Session(Inventory(Path("hosts.toml"), hosts, JobDefaults(workdir=Path())), job, **options)

    def status(self) -> Any:
        state = "succeeded" if self.ended else "running"
        nodes = [
            {"name": f"n{number}", "state": "lost" if f"n{number}" in self.lost else "running",
             "ranks": [{"rank": number - 1, "local_rank": 0, "pid": 100 + number, "state": "running"}]}
            for number in range(1, COUNT + 1)
            if f"n{number}" not in self.strange
        ]  # fmt: skip
        return {
            "job": "a", "state": state, "generation": 0, "nodes": nodes, "warnings": [], "last_seq": 0,
            "world_size": COUNT, "coordinator_reachable": True,
        }  # fmt: skip


class Node:
    """A connection to one host."""

    opened = SimpleNamespace(refused=None)

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.host, self.hello = SimpleNamespace(name=name), dict[str, Any]()
        self.closed = asyncio.Event()
        self.channel = self
        self.passing = asyncio.Semaphore(10)
        self.heard_at = 0.0
        self._cluster, self._name = cluster, name

    async def call(
        self, op: str, args: dict[str, Any] | None = None, body: bytes = b"", timeout: float = 30.0
    ) -> Answer:
        self._cluster.asked[f"{self._name} {op}"] += 1
        if op == "open" and self._name in self._cluster.strange:
            raise CallFailed("no_such_job", "no job named a")
        return self._answer(self._name, op)

    def _answer(self, name: str, op: str) -> Answer:
        cluster = self._cluster
        if op == "jobs":
            entry = {
                "job": "a", "live": not cluster.ended, "state": "running", "generation": 0, "world_size": COUNT,
                "created_ns": 1, "updated_ns": 1, "tree": None, "node": name, "script": "x", "warm_until_ns": None,
                "agent_pid": 1,
            }  # fmt: skip
            return Answer({"jobs": [] if name in cluster.strange else [entry]})
        live = not cluster.ended and name not in cluster.lost
        role = "coordinator" if name == "n1" else "member"
        identity = {
            "job": "a", "node": name, "term": 1, "journal_term": 1, "role": role, "live": live, "last_seq": 0,
            "members": {name: {"address": name, "port": 1}}, "build": "", "coordinator_reachable": True,
            "ended": cluster.ended, "program": "p", "authorities": [],
        }  # fmt: skip
        listed = [{"generation": 0, "rank": int(name[1:]) - 1, "stream": "stdout", "size": 9}]
        if name == cluster.malformed:
            listed = [{"generation": 0}]
        answers: dict[str, Any] = {
            "open": {"live": live, "node": name}, "identity": identity, "status": cluster.status(), "attach": {},
            "log_list": {"files": listed}, "signal": {"refused": {}},
        }  # fmt: skip
        return Answer(answers[op])

    async def stream(self, op: str, args: Any = None) -> Items:
        cluster = self._cluster
        if op == "relay":
            cluster.asked[f"{args['node']} {args['op']} through {self._name}"] += 1
            if args["node"] in cluster.lost:
                raise CallFailed("unreachable", f"{self._name} does not reach {args['node']}")
            yield self._answer(args["node"], args["op"])
            return
        if op == "status":
            cluster.asked[f"{self._name} status"] += 1
            yield Answer(cluster.status())
            return
        if op == "watch":
            yield Answer({"status": cluster.status()})
        if not cluster.ended:
            await self.closed.wait()
            raise ChannelClosed("closed")

    async def close(self) -> None:
        self.closed.set()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(host_link, "connect", made.connect)
    monkeypatch.setattr(host_link, "FIRST_DELAY", 5.0)
    return made


def run(coroutine: Any) -> Any:
    return waiting.run(coroutine, 600)


async def ready(session: Session) -> None:
    await session.ready()
    if session.follows:
        await session.until_current()
    else:
        session.set_status(await session.call("status"))


@pytest.mark.parametrize("job", ["a", None], ids=["named", "chosen"])
def test_who_attaches_connects_to_three_hosts_and_sees_all(cluster: Cluster, job: str | None) -> None:
    async def scenario() -> None:
        async with cluster.session(job=job, attach="control") as session:
            await ready(session)
            await asyncio.sleep(30)
            assert sorted(cluster.connected) == ["n1", "n2", "n3"]
            assert len(session.hosts) == COUNT
            assert {view.state for view in session.hosts.values()} == {"up"}
            assert Counter(view.text for view in session.hosts.values())["agent answers"] == 3
            assert session.links["n4"].view.text.startswith("through n")
            assert await session.settle() == []

    run(scenario())


def test_who_asks_for_the_status_asks_one_node(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with cluster.session() as session:
            await session.ready()
            assert (await session.call("status"))["world_size"] == COUNT
        assert len(cluster.connected) <= 3
        assert not [asked for asked in cluster.asked if "through" in asked]

    run(scenario())


def test_the_command_for_the_status_does_so(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text("".join(f'[[hosts]]\nname = "n{number}"\nssh = "n{number}"\n' for number in range(1, COUNT + 1)))
    cluster.lost = {"n50"}
    monkeypatch.setattr(asyncio, "run", run)
    for more in ([], ["--json"]):
        assert main(["status", str(path), "a", *more]) == 0
        assert "n200" in capfd.readouterr().out
        assert sorted(cluster.connected) == ["n1", "n2", "n3"]
        cluster.connected.clear()
    assert not [asked for asked in cluster.asked if "through" in asked]


def test_all_files_are_listed_through_few_hosts_and_those_of_one_rank_by_one(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with cluster.session() as session:
            await ready(session)
            assert hosts_of(session, [16, 99]) == ["n100", "n17"]
            assert hosts_of(session, [COUNT]) is None
            (one,) = await files(session, hosts_of(session, [16]))
            assert (one["node"], one["rank"]) == ("n17", 16)
            assert sum(count for asked, count in cluster.asked.items() if "through" in asked) == 1
            assert [file["node"] for file in await files(session)] == [f"n{number}" for number in range(1, COUNT + 1)]
            # They share the work.
            by = Counter(asked.split()[-1] for asked in cluster.asked if "through" in asked)
            assert set(by) == {"n1", "n2", "n3"}
            assert max(by.values()) <= COUNT / 3 + 1
        assert sorted(cluster.connected) == ["n1", "n2", "n3"]

    run(scenario())


def test_what_changes_something_is_asked_on_the_hosts_own_connection(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with cluster.session(follow=True) as session:
            await ready(session)
            answer = await session.request("signal", ranks=[16], signal="USR1")
            assert answer["ranks"]["16"]["accepted"]
            assert sorted(cluster.connected) == ["n1", "n17", "n2", "n3"]
            assert session.links["n17"].through is None
            await session.reach()
            assert len(session.opened_links()) == COUNT

    run(scenario())


def test_hosts_that_do_not_lead_to_the_job_are_passed_over(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.absent = {f"n{number}" for number in range(1, 11)}
        cluster.strange = {f"n{number}" for number in range(11, 21)}
        async with cluster.session() as session:
            await ready(session)
            assert len(set(cluster.connected)) <= 24
            listed = {file["node"] for file in await files(session)}
            assert listed == {f"n{number}" for number in range(1, COUNT + 1)} - cluster.strange

    run(scenario())


def test_a_job_that_nobody_knows_is_sought_everywhere(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.strange = {f"n{number}" for number in range(1, COUNT + 1)}
        async with cluster.session() as session:
            with pytest.raises(Unreachable, match="no job named a there"):
                await session.ready()
            assert len(set(cluster.connected)) == COUNT

    run(scenario())


@pytest.mark.parametrize("live_only", [True, False])
def test_a_job_without_a_name_is_sought_where_it_may_be(cluster: Cluster, live_only: bool) -> None:
    """A verb must not take the one job that three hosts know for the only one."""

    async def scenario() -> None:
        cluster.ended = not live_only
        async with cluster.session(job=None, live_only=live_only) as session:
            await session.ready()
            assert (session.job, len(set(cluster.connected))) == ("a", COUNT)

    run(scenario())


def test_the_files_of_a_job_that_is_over_are_read_on_their_hosts(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.ended = True
        async with cluster.session() as session:
            await ready(session)
            assert len(cluster.connected) == 3
            assert len(await files(session)) == COUNT
            assert len(set(cluster.connected)) == COUNT
            assert not [asked for asked in cluster.asked if "through" in asked]

    run(scenario())


def test_a_lost_node_is_connected_to(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.lost = {"n50", "n51"}
        async with cluster.session(attach="watch") as session:
            await ready(session)
            await session.settle()
            assert sorted(cluster.connected) == ["n1", "n2", "n3", "n50", "n51"]
            assert session.links["n50"].view.live is False
            assert len(await files(session)) == COUNT

    run(scenario())


def test_a_host_that_others_do_not_reach_is_connected_to(cluster: Cluster) -> None:
    async def scenario() -> None:
        async with cluster.session() as session:
            await ready(session)
            # The coordinator has not noticed it yet.
            cluster.lost = {"n50"}
            for through in ("n2", "n3", "n1"):
                with pytest.raises(Unreachable, match=f"n50: through {through}: {through} does not reach n50"):
                    await files(session, ["n50"])
            await session.settle(["n50"])
            assert [file["node"] for file in await files(session, ["n50"])] == ["n50"]

    run(scenario())


@pytest.mark.parametrize("attempts", [1, 2], ids=["while it is waited", "while it is tried again without asking"])
def test_who_calls_for_a_question_is_asked(cluster: Cluster, attempts: int) -> None:
    async def scenario() -> None:
        cluster.asking = "n2"
        async with cluster.session(count=3) as session:
            await ready(session)
            while len(cluster.questions) < attempts or not session.links["n2"].view.asks:
                await asyncio.sleep(0.05)
            assert session.ask_user() == 1
            await asyncio.sleep(1)
            assert cluster.questions == [True, *[False] * (attempts - 1), True]

    run(scenario())


def test_a_malformed_answer_that_was_passed_on_counts_for_that_host_only(cluster: Cluster) -> None:
    async def scenario() -> None:
        left_out: list[str] = []
        cluster.malformed = "n50"
        session = cluster.session(note_left_out=lambda name, _reason: left_out.append(name))
        async with session:
            await ready(session)
            assert len(await files(session)) == COUNT - 1
            assert left_out == ["n50"]
            assert [name for name, link in session.links.items() if link.is_malformed] == ["n50"]
            assert "through n" in str(session.links["n50"].view.error)
            await session.settle(["n50"])
            assert "n50" in cluster.connected, "its own connection shows who forged it"

    run(scenario())


@pytest.mark.parametrize("count", [64, 65])
def test_up_to_64_hosts_all_are_connected_to(cluster: Cluster, count: int) -> None:
    async def scenario() -> None:
        async with cluster.session(count) as session:
            await ready(session)
            await session.settle()
        assert len(cluster.connected) == (count if count <= 64 else 3)

    run(scenario())


def test_a_host_without_a_connection_is_asked_through_another_one(cluster: Cluster) -> None:
    async def scenario() -> None:
        cluster.absent = {"n7"}
        async with cluster.session(20) as session:
            await ready(session)
            await session.settle()
            link = session.links["n7"]
            assert (link.view.state, link.view.text[:9], link.view.error) == (
                "up",
                "through n",
                "the gateway is closed",
            )
            assert "n7" in {file["node"] for file in await files(session)}
            cluster.absent = set()
            await waiting_for(session, lambda: link.opened)
            assert (link.view.text, link.view.error) == ("agent answers", None)

    run(scenario())


async def waiting_for(session: Session, done: Any) -> None:
    await session.wait_until(done, 100)
    assert done()


def test_the_stub_answers_as_agents_do() -> None:
    node = Node(Cluster(), "n5")
    for op in ("identity", "log_list", "jobs"):
        read_answer("n5", op, node._answer("n5", op))

"""From inventory and command line to the job description; nothing is started when it cannot be made."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.wire import JOB_NAME, Answer, CallFailed, JobSpec
from supervisor.cli.up import job_options, parse_up
from supervisor.errors import HostError, JobInTheWay, LaunchFailed, UsageError
from supervisor.inventory import Host, Inventory, JobDefaults
from supervisor.launch import bringup
from supervisor.launch.launch import Launch
from supervisor.launch.specs import UpOptions, check_job, make_job_name, make_plan, merge_host, tree_for
from supervisor.link.view import HostView, LaunchPlan
from supervisor.ssh.scan import Tree
from tests.fast import waiting
from tests.fast.cases import DATA
from tests.fast.waiting import some
from tests.fast.world import spec


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "work"
    (directory / "sub").mkdir(parents=True)
    (directory / "train.py").write_text("pass")
    (directory / "sub" / "other.py").write_text("pass")
    (tmp_path / "outside.py").write_text("pass")
    return directory


def names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} & {field.name for field in dataclasses.fields(JobSpec)}


SETTINGS = {*job_options(parse_up(["t.py"])).settings}
JOB_KEYS, OPTIONS = names(JobDefaults), names(UpOptions) | SETTINGS
# A value in [job] and another one on the command line; a new key with an option of its name has none, and fails.
VALUES: dict[str, tuple[Any, Any]] = {
    "env": ({"A": "1"}, {"A": "2"}), "keep_warm": (60.0, 0.0), "max_restarts": (3, 0),
    "slow": (True, False), "snapshots": (("a.pt",), ("b.pt",)), "standby": ("off", "auto"), "stop_grace": (7.0, 1.0),
}  # fmt: skip


def hosts_of(work: Path, count: int = 4, *, spares: tuple[int, ...] = (), **job: Any) -> Inventory:
    hosts = tuple(
        Host(f"n{i}", f"n{i}.x", f"10.0.0.{i}", nproc_per_node="2", spare=i in spares, env={"H": str(i)})
        for i in range(1, count + 1)
    )
    regular = count - len(spares)
    defaults = {"min_nodes": regular, "max_nodes": regular, "max_restarts": 3, **job}
    return Inventory(work.parent / "hosts.toml", hosts, JobDefaults(workdir=work, **defaults))


def alone(work: Path) -> Inventory:
    return Inventory(None, (Host("here", "localhost", "127.0.0.1", local=True),), JobDefaults(work, sync=False))


def test_defaults_come_from_the_inventory(work: Path) -> None:
    plan = make_plan(hosts_of(work, env={"A": "1"}, stop_grace=7.0), UpOptions("train.py", ("-x",)), work)
    spec = plan.spec
    assert plan.hosts == ("n1", "n2", "n3", "n4")
    assert [node.name for node in spec.nodes] == ["n1", "n2", "n3", "n4"]
    assert (spec.min_nodes, spec.max_nodes, spec.max_restarts, spec.stop_grace) == (4, 4, 3, 7.0)
    assert (spec.script, spec.args, spec.kind, spec.workdir) == ("train.py", ("-x",), "script", ".")
    assert spec.tree is not None
    assert spec.tree.startswith("work-")
    assert spec.env == {"A": "1"}
    assert spec.nodes[0].env == {"H": "1"}
    assert JOB_NAME.fullmatch(spec.job)
    assert spec.job.startswith("train-")


@pytest.mark.parametrize("name", sorted(JOB_KEYS & OPTIONS))
def test_an_option_wins_over_its_key(work: Path, name: str) -> None:
    key, option = VALUES[name]
    inventory = hosts_of(work, **{name: key})
    assert getattr(make_plan(inventory, UpOptions("train.py"), work).spec, name) == key
    given: Any = {"settings": {name: option}} if name in SETTINGS else {name: option}
    assert getattr(make_plan(inventory, UpOptions("train.py", **given), work).spec, name) == option


def outcome(work: Path, asked: dict[str, Any]) -> str:
    """What becomes of a request: `on`: this machine or so many hosts; `job`: keys of [job]; the rest are options."""
    here, count = work / asked.pop("cwd", "."), asked.pop("on", 4)
    job, spares = asked.pop("job", {}), tuple(asked.pop("spares", ()))
    inventory = alone(work) if count == "this machine" else hosts_of(work, count, spares=spares, **job)
    options = UpOptions(asked.pop("script", "train.py").replace("WORK", str(work)), **asked)
    try:
        plan = make_plan(inventory, options, here)
    except UsageError as refused:
        return f"refused: {refused.message}".replace(str(work.parent), "ABOVE")
    spec = plan.spec
    text = f"{spec.script} in {spec.workdir} {'synced' if spec.tree else 'not synced'}"
    return f"{text} on {' '.join(plan.hosts)} ({spec.min_nodes}-{spec.max_nodes})".replace(str(work), "WORK")


LAUNCHES = [line.split(" -> ") for line in (DATA / "launches.txt").read_text().splitlines()[1:]]


@pytest.mark.parametrize(("asked", "becomes"), LAUNCHES)
def test_what_becomes_of_a_request(work: Path, asked: str, becomes: str) -> None:
    assert outcome(work, json.loads(asked)) == becomes


@pytest.mark.parametrize("name", ["a b", "x.toml"])
def test_a_bad_name_of_a_job_is_refused(work: Path, name: str) -> None:
    with pytest.raises(UsageError, match="job name"):
        make_plan(hosts_of(work), UpOptions("train.py", job=name), work)


def test_a_workdir_that_is_not_there_is_named_before_the_script(work: Path) -> None:
    inventory = hosts_of(work)
    elsewhere = dataclasses.replace(inventory.job, workdir=work / "gone")
    with pytest.raises(UsageError, match=r"\[job\]\.workdir: .*gone: there is no such directory"):
        make_plan(dataclasses.replace(inventory, job=elsewhere), UpOptions("train.py"), work)


def test_a_tree_that_is_only_on_the_nodes(work: Path) -> None:
    inventory = hosts_of(Path("/nowhere/at/all"), sync=False)
    spec = make_plan(inventory, UpOptions("train.py"), work / "sub").spec
    assert (spec.script, spec.workdir, spec.tree) == ("train.py", "/nowhere/at/all", None)


def test_a_script_that_is_not_sent_is_refused(work: Path) -> None:
    inventory = hosts_of(work, exclude=("*.py",))
    plan = make_plan(inventory, UpOptions("train.py"), work)
    with pytest.raises(UsageError, match="is excluded"):
        tree_for(inventory, plan.spec)
    tree = some(tree_for(hosts_of(work), plan.spec))
    assert tree.name == plan.spec.tree


def test_job_names() -> None:
    assert make_job_name("a/b/My Train!.py").startswith("My-Train-")
    assert make_job_name("/x/---.py").startswith("job-")
    assert len({make_job_name("t.py") for _ in range(50)}) > 40
    assert len(make_job_name("x" * 200 + ".py")) <= 64
    assert check_job("a-1.b_2") == "a-1.b_2"


def test_a_host_that_joins_takes_its_place_in_the_order(work: Path) -> None:
    inventory = hosts_of(work, 4, spares=(2,))
    spec = make_plan(inventory, UpOptions("train.py", nnodes="1"), work).spec
    assert [node.name for node in spec.nodes] == ["n1", "n2"]
    host = some(inventory.host("n3"))
    assert [node.name for node in merge_host(spec, host, inventory).nodes] == ["n1", "n2", "n3"]
    first = some(inventory.host("n1"))
    assert merge_host(spec, first, inventory) is spec


def test_a_script_and_a_named_job_have_work_trees_of_their_own(work: Path) -> None:
    def tree(**options: Any) -> str | None:
        return make_plan(hosts_of(work), UpOptions(**options), work).spec.tree

    assert tree(script="train.py") == tree(script="./train.py", args=("--lr", "1"))
    (work / "eval.py").write_text("")
    trees = [tree(script="train.py"), tree(script="eval.py"), *(tree(script="train.py", job=job) for job in "ab")]
    assert len(set(trees)) == len(trees)
    assert tree(script="train.py", job="a") == tree(script="eval.py", job="a")


# A launch decides as soon as it can, and says what is in the way; its hosts are made up.


WAIT_S = 30.0
NAMES = ("n1", "n2", "n3", "n4")
StartOn = Callable[[str, bringup.Material], Awaitable[None]]


def launch(monkeypatch: pytest.MonkeyPatch, start_on: StartOn, **job: Any) -> list[str]:
    """Launch on n1 … n4, each of which is brought up by `start_on`; return the notices."""
    notices: list[str] = []

    def link(name: str) -> SimpleNamespace:
        view = HostView(name)
        return SimpleNamespace(host=SimpleNamespace(name=name), view=view, opened=False, fail=lambda *_: None)

    async def start(_hub: object, name: str, material: bringup.Material) -> None:
        await start_on(name, material)

    async def address(one: SimpleNamespace, _spec: object) -> dict[str, Any]:
        return {"address": one.host.name, "port": 1}

    async def assign(*_: object) -> None:
        notices.append("assigned")

    monkeypatch.setattr(bringup, "start_on", start)
    monkeypatch.setattr(bringup, "peer_address", address)
    monkeypatch.setattr(bringup, "assign", assign)
    monkeypatch.setattr("supervisor.launch.launch.quick", lambda _views: [])
    plan = LaunchPlan(spec(4, **job), NAMES)
    hub: Any = SimpleNamespace(
        inventory=SimpleNamespace(path=Path("hosts.toml")),
        links={name: link(name) for name in plan.hosts},
        notice=lambda text, *_: notices.append(text),
        own_late=lambda _tasks: None,
        trust=lambda _fingerprints: None,
    )
    waiting.run(Launch(plan).run(hub), WAIT_S)
    return notices


def test_a_launch_that_cannot_succeed_any_more_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_on(name: str, _material: bringup.Material) -> None:
        if name == "n2":
            await asyncio.Event().wait()
        raise HostError(name, "connect", "connection refused")

    with pytest.raises(LaunchFailed, match="0 of 4 hosts came up and 3 failed, 2 are needed") as failed:
        launch(monkeypatch, start_on, min_nodes=2)
    assert [failure.host for failure in failed.value.failures] == ["n[1,3-4]"]
    # One error of three hosts is one line.
    assert str(failed.value).splitlines()[0] == "n[1,3-4]: connect: connection refused"


def test_a_live_job_with_the_same_tree_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_on(name: str, _material: bringup.Material) -> None:
        if name != "n3":
            await asyncio.Event().wait()
        raise JobInTheWay(
            name, "sync", "job old is live and runs from the same work tree", "supervisor attach HOSTS old"
        )

    with pytest.raises(UsageError, match="job old is live and runs from the same work tree on n3") as refused:
        launch(monkeypatch, start_on)
    assert (refused.value.exit_status, refused.value.hint) == (2, "supervisor attach hosts.toml old")


def test_files_of_earlier_runs_are_named_before_the_script_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_on(name: str, material: bringup.Material) -> None:
        material.left[name] = () if name == "n4" else ("snapshot.pt", "out/")

    first, *rest = launch(monkeypatch, start_on)
    assert first.startswith("n[1-3]: the work tree has files of earlier runs, which the script will find: snapshot.pt")
    assert set(rest) == {"assigned"}


class Trees:
    """What one launch meets: four hosts, each with a work tree that one launch at a time can lock."""

    def __init__(self, holders: dict[str, Trees], unreachable: str = "", hangs: str = "") -> None:
        self.holders = holders
        self.unreachable = unreachable
        self.hangs = hangs
        self.connected = {name: asyncio.Event() for name in NAMES}

    def connect(self, *names: str) -> None:
        """Let the launch reach hosts."""
        for name in names:
            self.connected[name].set()

    async def launch(self) -> None:
        await Launch(LaunchPlan(spec(4, min_nodes=3, settle_timeout=0.0), NAMES)).run(self.hub())

    def hub(self) -> Any:
        return SimpleNamespace(
            inventory=SimpleNamespace(path=Path("hosts.toml")),
            links={name: self.link(name) for name in NAMES},
            notice=lambda *_: None,
            set_spec=lambda _spec: None,
            own_late=lambda admissions: [admission.close() for admission in admissions.values()],
            trust=lambda _fingerprints: None,
        )

    def link(self, name: str) -> SimpleNamespace:
        async def bring_up(prepare: Callable[[Any], Awaitable[None]]) -> None:
            await self.connected[name].wait()
            if name == self.unreachable:
                raise HostError(name, "connect", "connection refused")
            await prepare(SimpleNamespace(host=host, channel=SimpleNamespace(call=call), start_agent=start_agent))

        async def call(op: str, *_: object, **__: object) -> Answer:
            if op == "open":
                raise CallFailed("no_such_job", "")
            if name == self.hangs:
                await asyncio.Event().wait()
            if op == "tree_plan" and self.holders.setdefault(name, self) is not self:
                raise CallFailed("tree_busy", "tree t is being synced by somebody else")
            done = {"root": "", "changed": 0, "removed": 0, "conflicts": [], "kept_in": None}
            return Answer({"missing": [], **done})

        async def start_agent(*_: object) -> dict[str, Any]:
            return {}

        async def idle(_timeout_s: float) -> None:
            return

        host = SimpleNamespace(name=name)
        return SimpleNamespace(
            host=host, view=HostView(name, live=True), opened=False, connected=False, bring_up=bring_up, idle=idle,
            fail=lambda *_: None, progress=lambda *_: None, learn_script=lambda _: None,
        )  # fmt: skip


@pytest.fixture
def light_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch does no more than to lock the trees of its hosts."""

    async def some(*_: object) -> dict[str, Any]:
        return {"address": "", "port": 1}

    async def tree(*_: object) -> Tree:
        return Tree("t", Path(), (), (), ())

    for name in ("engine", "peer_address", "assign"):
        monkeypatch.setattr(bringup, name, some)
    monkeypatch.setattr("supervisor.launch.launch.read_tree", tree)
    monkeypatch.setattr("supervisor.launch.launch.quick", lambda _views: [])


@pytest.mark.usefixtures("light_launch")
@pytest.mark.parametrize("first", ["connected", "unreachable", "silent"])
def test_of_two_launches_of_one_tree_at_the_same_time_one_starts(first: str) -> None:
    """Both lock the first host before the others; if it cannot be had, the next one."""

    async def body() -> None:
        holders: dict[str, Trees] = {}
        one, other = (Trees(holders, "n1" if first == "unreachable" else "") for _ in range(2))
        meet = NAMES[0] if first == "connected" else NAMES[1]
        start = asyncio.ensure_future(one.launch())
        one.connect(meet, *(["n1"] if first == "unreachable" else []))
        while meet not in holders:
            await asyncio.sleep(0.001)
        # It reaches the other hosts earlier than the launch that has the lock.
        other.connect(*(NAMES if first != "silent" else NAMES[1:]))
        with pytest.raises(UsageError, match=f"tree t is being synced by somebody else on {meet}"):
            await other.launch()
        assert set(holders.values()) == {one}, "the launch that is refused keeps nobody from starting"
        one.connect(*NAMES[1:])
        await start

    waiting.run(body(), WAIT_S)


@pytest.mark.usefixtures("light_launch")
def test_hosts_that_hang_before_their_tree_is_locked_keep_no_other_waiting() -> None:
    holders: dict[str, Trees] = {}
    one = Trees(holders, hangs="n1")
    one.connect(*NAMES)
    waiting.run(one.launch(), WAIT_S)
    assert set(holders) == {*NAMES[1:]}

"""Parts of a node's agent: its log, `clean`, an operator's shell, hooks for chats, the process of stores."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote_agent.agent import agent_log
from remote_agent.agent.context import Life
from remote_agent.agent.hooks import DISCORD_CHARS, message
from remote_agent.agent.jobs import clean
from remote_agent.agent.keeping import EngineKeeper, reuse_key, standing
from remote_agent.base.paths import Home
from remote_agent.bridge.shell import rank_environment
from remote_agent.engine import installed
from remote_agent.engine.order import Order
from remote_agent.engine.processes import Orphans
from remote_agent.engine.standby import LastStart, named_by, set_by
from remote_agent.engine.torch_processes import TorchProcesses
from remote_agent.runtime import containers
from remote_agent.wire import JobSpec, NodeSpec, Problem
from remote_agent.wire.answers import TorchFacts
from tests.agents.engine_process import order
from tests.fast.cases import Case, read_cases


def record(line: int, text: str) -> logging.LogRecord:
    return logging.LogRecord("agent", logging.INFO, "agent.py", line, text, (), None)


def test_one_place_in_the_code_logs_a_few_lines_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("remote_agent.agent.agent_log.time.monotonic", lambda: now)
    sparing = agent_log.Sparing()
    assert sum(sparing.filter(record(1, "too many open files")) for _ in range(5000)) == agent_log.BURST
    assert sparing.filter(record(2, "another place"))
    now += agent_log.PERIOD_S
    next_one = record(1, "too many open files")
    assert sparing.filter(next_one)
    assert next_one.getMessage() == f"too many open files (and {5000 - agent_log.BURST} like it left out)"


def test_a_long_log_keeps_its_beginning_and_its_newest_lines(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    lines = [b"%d %s\n" % (number, b"x" * 90) for number in range(30_000)]
    with open(path, "ab", buffering=0) as appending:
        appending.write(b"".join(lines))
        agent_log.cut(path)
        appending.write(b"the end\n")
    kept = path.read_bytes()
    assert len(kept) < agent_log.LIMIT
    first, _, newest = kept.partition(b" bytes are left out here]\n")
    left_out = int(first[first.rfind(b"[") + 1 :])
    first = first[: first.rfind(b"[")]
    assert b"".join(lines).startswith(first)
    assert (b"".join(lines) + b"the end\n").endswith(newest)
    assert left_out + len(first) + len(newest) == len(b"".join(lines)) + len(b"the end\n")


def test_a_short_log_or_none_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    agent_log.cut(path)
    path.write_bytes(b"a line\n")
    agent_log.cut(path)
    assert path.read_bytes() == b"a line\n"


# What `clean` removes on a node.


def test_what_scripts_load_is_remembered_until_the_last_job_is_removed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for name in ("a", "b"):
        files = home.job(name)
        files.root.mkdir(parents=True)
        files.spec.write_text(json.dumps(JobSpec(name, "train.py", (NodeSpec("n1", "n1", "1"),)).to_json()))
    home.standby.mkdir()
    (home.standby / "0.json").write_text("{}")
    assert clean(home, "a")["removed"] == ["a"]
    assert home.standby.is_dir()
    assert clean(home, "b")["removed"] == ["b"]
    assert not home.standby.exists()
    assert home.job_names() == []


# The variables of an operator's shell: those of the rank, without what is the rank's alone and without ours.


def environ(proc: Path, *entries: str) -> None:
    (proc / "7").mkdir(exist_ok=True)
    # A rank that was started warm has its own ones last, and room behind them.
    (proc / "7" / "environ").write_bytes("\0".join(entries).encode() + b"\0\0\0")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (("PYTHONPATH=/home/u/jobs/j/generation_0/.run-ab1:/lib",), "/lib"),
        (("PYTHONPATH=/home/u/jobs/j/.wait-ab1",), None),
        (("PYTHONPATH=/tmp/supervisor-run-a:/tmp/supervisor-run-a",), ""),
        (("PYTHONPATH=/home/u/jobs/j/.wait-ab1:/lib", "PYTHONPATH=/lib"), "/lib"),
        (("PYTHONPATH=/lib:/home/u/.run-x",), "/lib:/home/u/.run-x"),
        ((), None),
    ],
)
def test_it_has_the_ranks_variables_alone(tmp_path: Path, given: tuple[str, ...], path: str | None) -> None:
    own = ("TORCHELASTIC_ERROR_FILE=/x/error.json", "SUPERVISOR_METRICS=/x/metrics.jsonl")
    environ(tmp_path, "HOME=/home/u", "EQUAL=a=b", "RANK=0", *given, *own, "RANK=3")
    env = rank_environment(7, 3, tmp_path)
    assert env == {"HOME": "/home/u", "EQUAL": "a=b", "RANK": "3", **({} if path is None else {"PYTHONPATH": path})}


def test_another_process_is_not_taken_for_the_rank(tmp_path: Path) -> None:
    environ(tmp_path, "RANK=2")
    assert rank_environment(7, 3, tmp_path) is None
    assert rank_environment(8, 3, tmp_path) is None


# What the webhook of a chat gets: one line, in which nobody is called by what a script has printed.


HEAD = {"job": "llama-7b", "event": "failure", "summary": "rank 3 (n2): ValueError: <!channel> & @all"}


@pytest.mark.parametrize(
    ("kind", "key", "text"),
    [
        ("slack", "text", "supervisor llama-7b: failure: rank 3 (n2): ValueError: &lt;!channel&gt; &amp; @all"),
        ("discord", "content", "supervisor llama-7b: failure: rank 3 (n2): ValueError: <!channel> & @all"),
        ("mattermost", "text", "supervisor llama-7b: failure: rank 3 (n2): ValueError: <!channel> & @\u200ball"),
    ],
)
def test_a_chat_gets_a_line_that_calls_nobody(kind: str, key: str, text: str) -> None:
    assert message(kind, HEAD)[key] == text


def test_discord_gets_no_mention_and_no_more_than_it_takes() -> None:
    found: Any = message("discord", {**HEAD, "summary": "x" * 5000})
    assert found["allowed_mentions"] == {"parse": []}
    assert len(found["content"]) == DISCORD_CHARS


def test_an_event_without_summary_ends_with_its_name() -> None:
    assert message("slack", {**HEAD, "event": "end", "summary": ""}) == {"text": "supervisor llama-7b: end"}


# The engine and the process that serves its stores: which answer belongs to which request.


class StoreProcess:
    """The other end of the wire, in this process."""

    pid = 2**22 + 1

    def __init__(self) -> None:
        self.is_over = False

    async def start(self, _popen: Callable[..., Any], _job: str, wire: socket.socket) -> StoreProcess:
        self.wire = wire.dup()
        self.wire.setblocking(False)
        return self

    async def request(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(await asyncio.get_running_loop().sock_recv(self.wire, 65536))
        return data

    def say(self, **message: Any) -> None:
        self.wire.send(json.dumps(message).encode())

    def kill(self) -> None:
        self.is_over = True

    def wait(self) -> int:
        return -9


async def test_a_request_that_overtakes_the_store_of_the_launch_gets_its_own_answer() -> None:
    process, failures = StoreProcess(), list[str]()
    torch = TorchProcesses("job", process.start, Orphans(), failures.append)
    await torch.serve("n1", socket.create_server(("127.0.0.1", 0)))
    process.say(ready=True)
    first = await process.request()
    # The next group is prepared while the store of the launch is still being opened.
    dropping = asyncio.ensure_future(torch.drop())
    second = await process.request()
    process.say(number=first["number"], error="address in use")
    while not failures:
        await asyncio.sleep(0)
    assert not dropping.done()
    process.say(number=second["number"], error="")
    await dropping
    assert failures == ["address in use"]
    await torch.close()
    assert process.is_over
    process.wire.close()


# An engine that outlives its job is taken by the next one in time, or not at all.


SPEC = JobSpec("first", "train.py", ())


class Engine:
    def __init__(self) -> None:
        self.standby = {"state": "ready"}
        self.ended = asyncio.Event()

    async def renew(self, seconds: float) -> None:
        """Nothing is at stake here."""


async def test_a_job_that_begins_when_the_time_is_over_is_refused() -> None:
    engine: Any = Engine()
    files: Any = None
    keeper = EngineKeeper(files, SPEC, Life(), engine)
    taker: Any = object()
    request = {"job": "next", "runs": reuse_key(SPEC), "standing": standing(), "env": {}}
    offer = asyncio.ensure_future(keeper._answer(taker, "take", request))
    await asyncio.sleep(0)
    assert await keeper.wait() is None, "keep_warm is 0"
    assert await offer
    with pytest.raises(Problem, match="not kept any more"):
        await keeper._answer(taker, "begin", {})


# What a script imports when it is run, by its text: only installed packages, and nothing that it may never reach.


PACKAGES = ("torch", "numpy", "data", "late", "rare")


def _started(root: Path, text: str, **changes: str) -> LastStart:
    """A start of a script beside which there is a module `data`, with the PACKAGES installed."""
    packages = root / "site-packages"
    for name in PACKAGES:
        (packages / name).mkdir(parents=True, exist_ok=True)
        (packages / name / "__init__.py").touch()
    tree = root / "tree"
    tree.mkdir()
    (tree / "data.py").touch()
    (tree / "train.py").write_text(text)
    described = {**order(root, "train.py", cwd=str(tree)), **changes}
    return LastStart(Order.from_args(described), {"PYTHONPATH": str(packages)}, None)


def _named(root: Path, text: str, **changes: str) -> list[str]:
    return named_by(_started(root, text, **changes))


@pytest.mark.parametrize("case", read_cases("scripts.txt"), ids=lambda case: case.body[:40])
def test_what_a_script_names_and_sets(tmp_path: Path, case: Case) -> None:
    (told,) = case.fields
    if told.startswith("{"):
        assert set_by(_started(tmp_path, case.body).order) == json.loads(told)
    else:
        assert " ".join(_named(tmp_path, case.body)) == told.replace("-", "")


def test_what_is_no_script_names_nothing(tmp_path: Path) -> None:
    assert _named(tmp_path, "\0") == []


def test_a_script_that_is_not_there_names_nothing(tmp_path: Path) -> None:
    assert _named(tmp_path, "import numpy\n", script="other.py") == []


def test_a_module_is_not_read(tmp_path: Path) -> None:
    assert _named(tmp_path, "import numpy\n", kind="module") == []


# What is remembered of an installed torch: it counts while the installation is as it was.


FACTS: TorchFacts = {
    "torch": "2.13.0", "python": "3.12.1", "gpus": 0, "devices": {"cpu": 4, "auto": 4}, "cuda": None, "nccl": None,
    "leaked": {}, "only_cpu": True,
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package torch that is found first, and that nothing may import here."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError\n")
    (package / "version.py").write_text("__version__ = '2.13.0'\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    return package


class Node:
    def __init__(self, root: Path, answer: TorchFacts) -> None:
        self.asked = 0
        self.answer = answer
        self._known = str(root / "torch.json")

    async def _ask(self) -> TorchFacts:
        self.asked += 1
        return self.answer

    def facts(self, nproc: str = "2") -> TorchFacts:
        return asyncio.run(installed.Installation(self._known, self._ask).facts(nproc))


def test_torch_is_asked_once_for_each_state_of_its_files(tmp_path: Path, package: Path) -> None:
    node = Node(tmp_path, FACTS)
    assert [node.facts(), node.facts(), node.facts("auto")] == [FACTS] * 3
    assert node.asked == 1
    (package / "version.py").write_text("__version__ = '2.14.0'\n")
    os.utime(package / "version.py", ns=(1, 1))
    node.answer = {**FACTS, "torch": "2.14.0"}
    assert node.facts()["torch"] == "2.14.0"
    # A package that is installed or removed beside it may be one that it needs.
    os.utime(package.parent, ns=(1, 1))
    node.facts()
    assert node.asked == 3


def test_devices_are_counted_each_time_where_there_may_be_some(tmp_path: Path, package: Path) -> None:
    node = Node(tmp_path, {**FACTS, "only_cpu": False})
    for nproc in ("8", "8", "auto", "gpu"):
        node.facts(nproc)
    assert node.asked == 3


def test_a_torch_that_is_broken_is_asked_again(tmp_path: Path, package: Path) -> None:
    node = Node(tmp_path, {"error": "ImportError: libcudart.so.13"})
    assert node.facts() == node.facts() == node.answer
    assert node.asked == 2
    node.answer = FACTS
    (tmp_path / "torch.json").write_text("[not json")
    assert node.facts() == FACTS


@pytest.mark.parametrize(
    ("tool", "runtime", "uid", "groups"),
    [
        ("podman", "crun", 1000, ["keep-groups"]),
        ("podman", "runc", 1000, []),
        ("podman", "crun", 0, []),
        ("docker", "", 1000, ["27", "44"]),
        ("docker", "", 0, []),
    ],
)
async def test_a_container_has_the_users_groups_and_amds_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, runtime: str, uid: int, groups: list[str]
) -> None:
    program = tmp_path / tool
    program.write_text(f"#!/bin/sh\necho {runtime}\n")
    program.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(os, "getgid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [44, 1000, 27])
    devices = tmp_path / "kfd", tmp_path / "dri"
    monkeypatch.setattr(containers, "AMD", devices)
    devices[1].touch()

    async def options(name: str) -> list[str]:
        kinds = await containers.is_rootless(str(program)), await containers.keeps_groups(str(program))
        words = containers.Container.new(str(program), "image", tmp_path).prefix([], "/work", [], *kinds)
        return [value for word, value in itertools.pairwise(words) if word == name]

    assert await options("--group-add") == groups
    assert not {str(path) for path in devices} & {*await options("--device")}, "/dev/dri alone is no GPU of AMD's"
    devices[0].touch()
    assert {str(path) for path in devices} <= {*await options("--device")}

"""What nodes answer passes one gate: whatever a node sends, it is that host's error or its readers can use it."""

from __future__ import annotations

import ast
import asyncio
import copy
import json
import socket
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from remote_agent.wire import Answer, CallFailed, Channel, Items, Problem, WireError, documents
from remote_agent.wire import answers as wire_answers
from remote_agent.wire.gate import Misfit, record, shape
from supervisor import bundle
from supervisor.errors import HostError, RequestFailed, why
from supervisor.inventory import Host
from supervisor.link.host_link import OPEN, HostLink
from supervisor.link.jobs import choose_job, group_jobs
from supervisor.logs.pages import part_of
from supervisor.logs.reader import LogReader
from supervisor.logs.selection import LogQuery, Selection
from supervisor.nccl import to_fabric
from supervisor.preflight import oddities
from supervisor.preflight.probe import Preflight
from supervisor.ssh import answers
from supervisor.ssh.answers import SHAPES, HostChannel, MalformedAnswer, read_answer
from supervisor.wording.events import event_line
from supervisor.wording.incidents import incident_text
from supervisor.wording.plan import plan
from supervisor.wording.status import fabric_lines, job_rows, status_lines
from tests.screens import recorded

ROOT = Path(__file__).parents[2]
Body = Callable[[HostChannel], Any]

HELLO: Any = {
    "protocol": 1, "version": "1", "hostname": "n2", "user": "u", "python": "3.11.2", "executable": "/bin/python3",
    "home": "/h", "cpu_count": 8, "disk_free": 10**12, "shm_free": None, "time_ns": 1_700_000_000 * 10**9, "pid": 7,
    "platform": "Linux x86_64", "uv": False,
}  # fmt: skip
FACTS: Any = {
    "sockets": {"kind": "", "message": "odd"}, "kernel": "6", "driver": None, "gpu_processes": None,
    "torch": {"torch": "2.13.0", "cuda": None, "nccl": None, "gpu_names": [], "python": "3.11", "gpus": 0},
    "env": {"NCCL_DEBUG": "INFO"}, "disk_free": {"/root": 10**12, "/h": None}, "shm": {"total": 10**9, "free": 10**9},
    "memlock": None, "open_files": 1024, "load": 0.5, "live_jobs": ["j"],
    "left_over": [{"pid": 3, "mode": "serve", "job": "j"}], "code": None, "remarks": [["no linger", "enable it"]],
}  # fmt: skip
JOBS: Any = {
    "jobs": [
        {"job": "j", "node": "n2", "live": True, "agent_pid": 3, "tree": None, "script": "t.py", "created_ns": 10**18,
         "updated_ns": None, "state": "running", "generation": 0, "world_size": 2, "warm_until_ns": None}
    ]
}  # fmt: skip
NCCL: Any = {
    "generation": 0, "stamp": "0:1", "groups": [{"ranks": [0, 1], "facts": {"version": "2.26", "env": {"A": "1"}}}],
    "comms": [[0, "c", 0, 2]], "links": [[0, "c", 0, 1, "P2P/CUMEM", 2]], "warnings": [[1, "connect returned", 5]],
}  # fmt: skip
ROW = {"generation": 0, "rank": 1, "stream": "stdout", "line": 5, "offset": 70, "t_ns": 10**18, "level": "I", "cut": 3}
# Also what JSON has no word for, and Python reads.
OTHERS: tuple[Any, ...] = (None, "x\ud800", "", -7, 1.5, 10**30, float("nan"), True, [], {}, [[[]]], {"a": []}, ["n1"])


def _job() -> recorded.RecordedSession:
    session = recorded.load("failed_4x2")
    session.status["nodes"][0]["vitals"] = {"age_s": 0.5, "every_s": 2, "cpu": 5, "gpus": [{"index": 0, "use": 3}]}
    session.status["nodes"][0]["ranks"][0]["progress"] = {"loss": "nan", "rate": 5, "unit": "it/s", "lag": 0}
    session.status["warnings"] = [{"kind": "slow", "node": "n1", "rank": None, "message": "slow"}]
    session.status["tree"] = {"digest": "a" * 64, "previous": {"digest": "b" * 64}}
    session.status["nodes"] = session.status["nodes"][:2]
    for event in session.events:
        if event["type"] == "incident":
            event["detail"] = session.incidents[0]
    return session


def variants(document: Any) -> Iterator[Any]:
    """Yield the document with each of its parts left out, or something else in its place."""
    for path in _paths(document, ()):
        for other in (..., *OTHERS):
            variant = copy.deepcopy(document)
            holder = variant
            for key in path[:-1]:
                holder = holder[key]
            if other is ...:
                del holder[path[-1]]
            else:
                holder[path[-1]] = other
            yield variant


def _paths(document: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    keys: Any = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield (*at, key)
        yield from _paths(document[key], (*at, key))


def _show_status(status: Any) -> None:
    status_lines(status)
    for op in ("restart", "remove", "add"):
        plan(op, ["n2"], status, [])
    to_fabric({"n1": None}, status)


def _show_facts(facts: Any) -> None:
    known: Any = {**HELLO, "clock_offset_ms": 0.1, "clock_error_ms": 0.1}
    result = Preflight(addresses={"n1": "10.0.0.1", "n2": "10.0.0.2"})
    result.facts = {"n1": FACTS | known, "n2": facts | known}
    for name, own in (("n1", FACTS), ("n2", facts)):
        result.facts[name]["disk_free"] = own["disk_free"]
    oddities.matrix(result)
    oddities.findings(result)


def _show_jobs(answer: Any) -> None:
    known = {"n1": JOBS["jobs"], "n2": answer["jobs"]}
    job_rows(group_jobs(known))
    choose_job(known, live_only=False)


def _show_fabric(answer: Any) -> None:
    fabric_lines(to_fabric({"n1": NCCL, "n2": answer}, _job().status))


CASES: dict[str, tuple[str, Any, Callable[[Any], object]]] = {
    "status": ("status", _job().status, _show_status),
    "watch": ("watch", {"status": _job().status}, lambda item: _show_status(item.get("status", _job().status))),
    "facts": ("facts", FACTS, _show_facts),
    "jobs": ("jobs", JOBS, _show_jobs),
    "nccl": ("nccl", NCCL, _show_fabric),
    "incidents": (
        "incidents",
        {"incidents": _job().incidents, "nccl": None},
        lambda answer: [incident_text(incident) for incident in answer["incidents"]],
    ),
    **{
        f"events-{number}": ("events", {"event": event}, lambda item: event_line(item["event"]))
        for number, event in enumerate(_job().events)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_document_with_any_part_wrong_is_refused_or_can_be_shown(case: str) -> None:
    op, document, show = CASES[case]
    show(read_answer("n2", op, Answer(copy.deepcopy(document))).data)
    refused = 0
    for variant in variants(document):
        try:
            data = read_answer("n2", op, Answer(variant)).data
        except MalformedAnswer:
            refused += 1
        else:
            show(data)
    assert refused > 20


def test_rows_are_as_many_as_texts_and_have_numbers_that_exist() -> None:
    for op in ("log_merged", "log_rows"):
        assert read_answer("n2", op, Answer({"rows": [ROW, ROW]}, b"a\nb")).data["rows"] == [ROW, ROW]
        assert read_answer("n2", op, Answer({"apart": 3})).data == {"apart": 3}
        for rows, body in (([ROW], b"a\nb"), ([ROW, ROW], b"a"), ([], b"a"), ([{}], b"a"), ([7], b"a"), ({}, b"a")):
            with pytest.raises(MalformedAnswer, match="rows"):
                read_answer("n2", op, Answer({"rows": rows}, body))
        for key in ("generation", "rank", "stream", "line", "offset", "t_ns", "level", "cut"):
            others: tuple[Any, ...] = ("x" * 99, 1.5, [], {}, 2**70, True)
            for other in others:
                with pytest.raises(MalformedAnswer, match="rows"):
                    read_answer("n2", op, Answer({"rows": [{**ROW, key: other}]}, b"a"))
        with pytest.raises(MalformedAnswer, match="lines"):
            read_answer("n2", op, Answer({"lines": -1}))
    for data in ({}, {"offset": 3}, {"generation": 0, "rank": 0, "stream": "stdout", "offset": "3"}):
        with pytest.raises(MalformedAnswer):
            read_answer("n2", "log_follow", Answer(data, b"text"))


@pytest.mark.parametrize("span", [{}, {"since_ns": 5}, {"since_ns": None, "until_ns": 9}])
def test_a_page_of_unknown_span_is_not_merged(span: dict[str, Any]) -> None:
    clocks: Any = SimpleNamespace(ahead_ns=lambda _name: 0, rows=lambda *_: [])
    with pytest.raises(KeyError, match="_ns"):
        part_of(clocks, "n2", read_answer("n2", "log_merged", Answer(span)))


def test_every_request_of_the_program_has_a_shape() -> None:
    asked = {op for path in (ROOT / "supervisor").rglob("*.py") for op in _requests(ast.parse(path.read_text()))}
    assert {"hello", "status", "log_merged", "tree_put", "collective_end"} <= asked
    assert not asked - SHAPES.keys()


def _requests(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        at = {"call": 0, "stream": 0, "whole_stream": 0, "try_call": 0, "ask": 2}.get(name)
        argument = node.args[at] if at is not None and len(node.args) > at else None
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


async def test_a_malformed_answer_is_the_hosts_error_and_the_channel_goes_on() -> None:
    hello = {key: value for key, value in HELLO.items() if key != "time_ns"}

    async def answer(op: str, args: Any, body: bytes) -> Answer | Items:
        if op == "stop":
            raise Problem("a\nb", "no\n  hint: do this", "\nc")
        return {"hello": Answer(hello), "tree_has": Answer({"has": True})}.get(op) or _items()

    async def _items() -> Items:
        yield Answer({"event": json.loads(json.dumps(_job().events[0]))})
        yield Answer({"event": {}})

    ours, theirs = socket.socketpair()
    channel = HostChannel("n2", *await asyncio.open_connection(sock=ours))
    other = Channel(*await asyncio.open_connection(sock=theirs), answer)
    owners = [asyncio.ensure_future(one.run()) for one in (channel, other)]
    try:
        with pytest.raises(HostError, match="n2: hello: its answer to `hello` is malformed: time_ns is missing") as e:
            await channel.call("hello")
        assert isinstance(e.value, WireError)
        assert why(e.value) == "its answer to `hello` is malformed: time_ns is missing"
        items = channel.stream("events")
        assert (await items.__anext__()).data["event"]["seq"] == 1
        with pytest.raises(MalformedAnswer, match="n2: events: .*seq is missing"):
            await items.__anext__()
        assert (await channel.call("tree_has")).data == {"has": True}
        with pytest.raises(CallFailed) as refused:
            await channel.call("stop")
        assert vars(refused.value) == {"kind": "a / b", "message": "no / hint: do this", "hint": "c"}
    finally:
        await channel.close()
        await other.close()
        await asyncio.wait_for(asyncio.gather(*owners), 60)


def _refusing(name: str, kind: str) -> Any:
    """A link to a host that refuses every request with that kind of error; without a kind it never answers."""

    async def call(_op: str, _args: Any = None, _body: bytes = b"", timeout: float = 30.0) -> Answer:
        if not kind:
            await asyncio.sleep(timeout)
        raise CallFailed(kind, "no")

    async def stream(op: str, _args: Any = None) -> Items:
        yield await call(op)

    owner: Any = SimpleNamespace(
        touch=lambda: None, notice=lambda *_: None, agent=SimpleNamespace(sha256=""), job="j", is_over=False
    )
    link: Any = HostLink(Host(name, name, name), owner)
    link._node, link._job = SimpleNamespace(channel=SimpleNamespace(call=call, stream=stream)), OPEN
    return link


def test_the_newest_coordinator_is_followed() -> None:
    """A node that is cut off from the coordinator stands in one election after the other, in ever newer terms."""

    def link(name: str, live: bool, **identity: Any) -> Any:
        one = _refusing(name, "")
        one.view.live, one.view.identity = live, identity
        return one

    alone = {"coordinator_reachable": False}
    candidate = link("cut off", True, role="waiting", term=9, journal_term=3, last_seq=80, **alone)
    group = link("coordinator", True, role="coordinator", term=3, journal_term=3, last_seq=90)
    older = link("an older coordinator", True, role="coordinator", term=2, journal_term=2, last_seq=99)
    end = link("files with the end", False, ended=True, term=3, journal_term=3, last_seq=95, **alone)
    files = link("files", False, term=3, journal_term=3, last_seq=99, **alone)

    def first(*links: Any) -> str:
        return str(max(links, key=lambda one: one.rank_as_source()).view.name)

    assert first(files, candidate, older, group) == "coordinator"
    assert first(files, candidate, older, end) == "files with the end"
    assert first(files, candidate) == "cut off"


def test_a_refusal_is_the_hosts_own_failure() -> None:
    async def ask(kind: str, op: str) -> Any:
        link = _refusing("n2", kind)
        with pytest.raises((CallFailed, MalformedAnswer)) as refused:
            await link.call(op)
        assert link.is_malformed == isinstance(refused.value, MalformedAnswer) != link.rank_as_source()[0]
        with pytest.raises(type(refused.value)):
            await link.stream(op).__anext__()
        return refused.value

    for op in ("status", "events", "log_rows"):
        wrong = asyncio.run(ask("internal", op))
        assert (type(wrong), why(wrong)) == (MalformedAnswer, f"it refuses `{op}`: no")
    for kind, op in (("pattern", "log_rows"), ("internal", "stop"), ("internal", "identity")):
        assert isinstance(asyncio.run(ask(kind, op)), CallFailed), op


async def test_a_log_request_that_fails_ends_those_that_are_still_being_answered() -> None:
    links = {"n1": _refusing("n1", ""), "n2": _refusing("n2", "pattern"), "n3": _refusing("n3", "")}
    hub: Any = SimpleNamespace(links=links, status={}, job="j")
    with pytest.raises(RequestFailed, match="no"):
        [row async for row in LogReader(hub, LogQuery(Selection())).existing()]


# What the gate lets through has the type that mypy believes: both read one declaration, field by field.


KINDS = {
    name: kind
    for module in (documents, wire_answers, answers, bundle)
    for name, kind in vars(module).items()
    if is_typeddict(kind) and kind.__module__ == module.__name__
}
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -9, 1.5, "x", "2026-11-20T10:00:00.123Z", "nan", [], {}, ["x"], [0, 0], ["x", 0], [0, 0, None]),
    *([[0, 0]], [["x", 0], ["x", 0]], {"x": 0}, {"x": "x"}, {"x": None}, 2**70, "x" * 300, float("nan")),
)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value has a type, as far as a type says it: the test's own reading of the declaration."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is(value, args[0])
    if kind is Any or origin is Literal:
        return kind is Any or value in args
    if origin in (Union, types.UnionType):
        return any(_is(value, one) for one in args)
    if origin is list:
        return isinstance(value, list) and all(_is(one, args[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(key, str) and _is(one, args[1]) for key, one in value.items())
    if is_typeddict(kind):
        fields = get_type_hints(kind, include_extras=True)
        return isinstance(value, dict) and all(_is(one, fields[key]) for key, one in value.items() if key in fields)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _examples(kind: Any) -> Iterator[Any]:
    """Yield values that the gate lets through as this type."""
    if is_typeddict(kind):
        yield _document(kind)
    if get_origin(kind) is list:
        yield [one for one in [next(_examples(get_args(kind)[0]), None)] if one is not None]
    for value in VALUES:
        if not _read(kind, value)[1]:
            yield value


def _document(kind: Any) -> dict[str, Any]:
    return {key: next(_examples(field)) for key, field in get_type_hints(kind, include_extras=True).items()}


def _read(kind: Any, value: Any) -> tuple[Any, str]:
    """Return what the gate returns, or why it refuses the value."""
    try:
        return shape(kind)(value), ""
    except Misfit as wrong:
        return None, str(wrong)


@pytest.mark.parametrize("name", KINDS)
def test_what_the_gate_lets_through_has_the_declared_type(name: str) -> None:
    kind = KINDS[name]
    whole = _document(kind)
    assert shape(kind)(whole) == whole
    for key, field in get_type_hints(kind, include_extras=True).items():
        rest = {other: value for other, value in whole.items() if other != key}
        if key in kind.__required_keys__:
            with pytest.raises(Misfit, match=f"^{key} is missing$"):
                shape(kind)(rest)
        else:
            assert shape(kind)(rest) == rest
        for value in (*VALUES, *_examples(field)):
            read, refused = _read(kind, {**rest, key: value})
            assert refused.startswith(key) if refused else _is(read[key], field), (key, value)


def test_a_declaration_that_the_gate_cannot_check_is_refused() -> None:
    for kind in (object, set, int | str, dict[int, str], frozenset[int], Literal["a"]):
        with pytest.raises(TypeError, match="cannot have a field of type"):
            record({"x": kind})({"x": 1})

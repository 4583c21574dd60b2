"""What a rank left is read whatever state it is in."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.engine.boot_dir import BootDirectory
from remote_agent.engine.evidence import read_error, read_evidence, read_tail
from remote_agent.engine.inspect.pulse import pulses
from remote_agent.engine.inspect.stacks import dump, fetch, tidy
from remote_agent.wire import MAX_HEADER, encode
from tests.versions import HANDLERS, LACKS


def error_file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "error.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(path, ns=(1_000_000_500_000_000, 1_000_000_500_000_000))
    return path


def test_torchs_form_has_the_files_finer_time(tmp_path: Path) -> None:
    document = {"message": {"message": "E: x", "extraInfo": {"py_callstack": "stack", "timestamp": "1000000"}}}
    assert read_error(error_file(tmp_path, json.dumps(document))) == {
        "message": "E: x",
        "callstack": "stack",
        "timestamp_ns": 1_000_000_500_000_000,
    }


def test_a_copied_file_has_the_time_that_it_says(tmp_path: Path) -> None:
    document = {"message": "text", "timestamp": 77}
    assert read_error(error_file(tmp_path, json.dumps(document))) == {
        "message": "text",
        "callstack": None,
        "timestamp_ns": 77_000_000_000,
    }


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"x"', "{}", '{"message": ', b"\xff\xfe", "[" * 100_000, '{"other": 1}'],
)
def test_a_broken_error_file_is_none(tmp_path: Path, text: str | bytes) -> None:
    assert read_error(error_file(tmp_path, text)) is None


@pytest.mark.parametrize(
    "inner", [None, 3, [], {}, {"extraInfo": 3}, {"message": {"a": 1}, "extraInfo": {"timestamp": "x"}}]
)
def test_an_error_file_of_another_shape_is_read_as_far_as_it_goes(tmp_path: Path, inner: Any) -> None:
    error = read_error(error_file(tmp_path, json.dumps({"message": inner})))
    assert error is not None
    assert error["timestamp_ns"] == 1_000_000_500_000_000
    assert isinstance(error["message"], str)


@pytest.mark.parametrize("stamp", ["Infinity", "-Infinity", "NaN", "1e300", "1" * 400, "-5"])
def test_a_time_that_is_none_is_that_of_the_file(tmp_path: Path, stamp: str) -> None:
    error = read_error(error_file(tmp_path, f'{{"message": "m", "timestamp": {stamp}}}'))
    assert error is not None
    assert error["timestamp_ns"] == 1_000_000_500_000_000


def test_a_long_message_is_cut_in_the_middle(tmp_path: Path) -> None:
    inner = {"message": "first" + "x" * 3_000_000 + "last", "extraInfo": {"py_callstack": "y" * 900_000}}
    error = read_error(error_file(tmp_path, json.dumps({"message": inner})))
    assert error is not None
    assert error["message"].startswith("first")
    assert error["message"].endswith("last")
    assert "2967241 characters left out" in error["message"]
    assert len(json.dumps(error)) < 70_000


def test_what_the_ranks_of_one_node_leave_fits_into_a_frame(tmp_path: Path) -> None:
    bar = "█" * 9_000
    (tmp_path / "stdout.log").write_text(bar)
    (tmp_path / "stderr.log").write_text(f"{bar}\nValueError: why\n{bar}")
    (tmp_path / "nccl.log").write_text(f"NCCL WARN {bar}")
    (tmp_path / "error.json").write_text(json.dumps({"message": "first" + "é" * 90_000 + "last"}))
    for ranks in (1, 8, 64, 512):
        exits: Any = [read_evidence(tmp_path, ranks)] * ranks
        assert len(encode({"re": 1, "ok": {"exits": exits}})) < MAX_HEADER / 2
        first, why, last = exits[0]["tail"].split("\n")
        assert (why, exits[0]["stderr_lines"]) == ("ValueError: why", 3), "the lines are counted from the end"
        assert first[0] == last[-1] == "█"
        assert exits[0]["error"]["message"].endswith("last")
    said = read_evidence(tmp_path)["said"]
    assert said is not None
    assert said["text"] == bar, "few ranks keep all"


def test_nothing_left(tmp_path: Path) -> None:
    assert read_evidence(tmp_path) == {"error": None, "tail": "", "stderr_lines": None, "said": None, "nccl": ""}


@pytest.mark.parametrize(
    ("text", "tail", "lines"),
    [
        (b"", "", 0),
        (b"one", "one", 1),
        (b"one\n", "one", 1),
        (b"one\n\n", "one\n", 2),
        (b"a\xff\r\n\x00b", "a\ufffd\r\n\x00b", 2),
        (b"".join(b"%d\n" % number for number in range(100)), "\n".join(str(number) for number in range(60, 100)), 100),
    ],
)
def test_the_tail(tmp_path: Path, text: bytes, tail: str, lines: int) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(text)
    assert read_tail(path) == (tail, lines)


def test_the_tail_of_a_large_file_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"x" * 30_000 + b"\n" + (b"y" * 5_000 + b"\n") * 20)
    tail, lines = read_tail(path)
    assert lines == 21
    assert set(tail.split("\n")) == {"y" * 5_000}
    path.write_bytes(b"z" * 200_000)
    assert read_tail(path) == ("z" * 65536, 1)


def test_stacks_without_the_servers_own_thread() -> None:
    dump = b'Current thread 0x1 (most recent call first):\n  <no Python frame>\n\nThread 0x2:\n  File "a", line 1\n'
    assert tidy(dump) == 'Thread 0x2:\n  File "a", line 1\n'
    assert tidy(b"Current thread:\n  <no Python frame>\n") == "Current thread:\n  <no Python frame>\n"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npong", b"pong"),
        (b"HTTP/1.1 404 Not Found\r\n\r\nno", None),
        (b"HTTP/1.1 200 OK", None),
        (b"", None),
        (b"garbage\r\n\r\n", None),
    ],
)
def test_a_worker_servers_answer(tmp_path: Path, answer: bytes, body: bytes | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        assert request.startswith(b"POST /handler/ping HTTP/1.0\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run() -> None:
        path = os.path.relpath(tmp_path / "s")
        async with await asyncio.start_unix_server(serve, path):
            if body is None:
                with pytest.raises(ValueError):
                    await fetch(path, "ping")
            else:
                assert await fetch(path, "ping") == body

    asyncio.run(run())


STACK = b'Thread 0x2 (most recent call first):\n  File "/home/me/train.py", line 7 in load\n'
RECORD = json.loads((Path(__file__).parent / "data" / "nccl_h100.json").read_text())["sleep"]["0"]["record"]


@pytest.mark.parametrize("version", LACKS)
def test_a_worker_server_is_asked_for_what_its_torch_has(tmp_path: Path, version: str) -> None:
    has = {name for name in HANDLERS if f"/handler/{name}" not in LACKS[version]}
    bodies = {"": json.dumps(sorted(has)).encode(), "dump_traceback": STACK}
    bodies.update({name: json.dumps(RECORD).encode() for name in has if name.endswith("json")})
    bodies["dump_nccl_trace_pickle"] = pickle.dumps(RECORD)
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode().removeprefix("/handler/")
        asked.append(name)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + bodies[name])
        await writer.drain()
        writer.close()

    async def run() -> tuple[Any, Any]:
        boot = BootDirectory(tmp_path)
        rank: Any = SimpleNamespace(rank=0, pid=os.getpid(), directory=tmp_path)
        try:
            async with await asyncio.start_unix_server(serve, boot.socket(0)):
                return (await pulses(boot, [rank], True))["0"], await dump(boot, {0: os.getpid()})
        finally:
            boot.close()

    pulse, stacks = asyncio.run(run())
    assert set(asked) - {""} <= has
    assert asked.count("") == 1
    assert pulse["groups"]
    if "dump_traceback" in has:
        assert pulse["where"] == "train.py:7 in load"
        assert stacks["stacks"] == {"0": STACK.decode()}
    else:
        reason = "this torch's worker server has no dump_traceback; py-spy shows stacks if it is installed on the node"
        assert stacks["stacks"] or stacks["unreachable"] == {"0": reason}

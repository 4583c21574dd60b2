"""Evidence that an agent's engine reads of its ranks: what they left, their stacks, their bytes, how far they came."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.agent import local_workers
from remote_agent.engine import sampler, worker
from remote_agent.engine.boot_dir import BootDirectory
from remote_agent.engine.evidence import read_error, read_evidence, read_tail
from remote_agent.engine.inspect import children, phases
from remote_agent.engine.inspect.children import NOT_ALLOWED, NOT_INSTALLED, is_at_a_file, spy
from remote_agent.engine.inspect.pulse import MAX_FRAMES, ended_part, pulses, read_flight, read_source, read_stack
from remote_agent.engine.inspect.sockets import remote_ends, transferred
from remote_agent.engine.inspect.stacks import dump, fetch, merged_records, tidy
from remote_agent.engine.processes import RankProcess
from remote_agent.logs.progress import StepReader
from remote_agent.wire import MAX_HEADER, encode
from tests.fast.waiting import some
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
    "text", ["", "{", "[]", "null", '"x"', "{}", '{"message": ', b"\xff\xfe", "[" * 100_000, '{"other": 1}']
)
def test_a_broken_error_file_is_none(tmp_path: Path, text: str | bytes) -> None:
    assert read_error(error_file(tmp_path, text)) is None


@pytest.mark.parametrize(
    "inner", [None, 3, [], {}, {"extraInfo": 3}, {"message": {"a": 1}, "extraInfo": {"timestamp": "x"}}]
)
def test_an_error_file_of_another_shape_is_read_as_far_as_it_goes(tmp_path: Path, inner: Any) -> None:
    error = some(read_error(error_file(tmp_path, json.dumps({"message": inner}))))
    assert error["timestamp_ns"] == 1_000_000_500_000_000
    assert isinstance(error["message"], str)


@pytest.mark.parametrize("stamp", ["Infinity", "-Infinity", "NaN", "1e300", "1" * 400, "-5"])
def test_a_time_that_is_none_is_that_of_the_file(tmp_path: Path, stamp: str) -> None:
    error = some(read_error(error_file(tmp_path, f'{{"message": "m", "timestamp": {stamp}}}')))
    assert error["timestamp_ns"] == 1_000_000_500_000_000


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
    said = some(read_evidence(tmp_path)["said"])
    assert said["text"] == bar, "few ranks keep all"


def test_nothing_left(tmp_path: Path) -> None:
    assert read_evidence(tmp_path) == {"error": None, "tail": "", "stderr_lines": None, "said": None, "nccl": ""}


@pytest.mark.parametrize(
    ("text", "tail", "lines"),
    [
        (b"", "", 0), (b"one", "one", 1), (b"one\n", "one", 1), (b"one\n\n", "one\n", 2),
        (b"a\xff\r\n\x00b", "a\ufffd\r\n\x00b", 2),
        (b"".join(b"%d\n" % number for number in range(100)), "\n".join(str(number) for number in range(60, 100)), 100),
    ],
)  # fmt: skip
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
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npong", b"pong"), (b"HTTP/1.1 404 Not Found\r\n\r\nno", None),
        (b"HTTP/1.1 200 OK", None), (b"", None), (b"garbage\r\n\r\n", None),
    ],
)  # fmt: skip
async def test_a_worker_servers_answer(tmp_path: Path, answer: bytes, body: bytes | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        assert request.startswith(b"POST /handler/ping HTTP/1.0\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    path = os.path.relpath(tmp_path / "s")
    async with await asyncio.start_unix_server(serve, path):
        if body is None:
            with pytest.raises(ValueError):
                await fetch(path, "ping")
        else:
            assert await fetch(path, "ping") == body


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


# py-spy's answers: read as Python's own stacks, and told why there are none; it never holds anything up.


LIB = "/usr/lib/python3.11/multiprocessing"
DUMP = f"""\
Process 7: python -u train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    Data.__getitem__ (/work/train.py:26)
    BaseProcess._bootstrap ({LIB}/process.py:314)
    <module> (/work/train.py:99)
Thread 8 (active+gil): "Thread-1 (feed)"
    _time_logger.<locals>.wrapper (/work/x (1).py:7)
    feed (/work/x.py:8)
"""
SPIED = f"""\
Thread Thread-1 (feed) (most recent call first):
  File "/work/x (1).py", line 7 in wrapper
  File "/work/x.py", line 8 in feed

Thread MainThread (most recent call first):
  File "/work/train.py", line 26 in __getitem__
  File "{LIB}/process.py", line 314 in _bootstrap
"""


@pytest.mark.parametrize(
    ("script", "stacks", "note"),
    [
        (f"cat <<'END'\n{DUMP}END", {7: SPIED, 9: SPIED}, ""),
        ("echo Permission Denied: Try running again >&2; exit 1", {}, NOT_ALLOWED),
        ("echo Error: No such process >&2; exit 1", {}, ""),
        ("exec sleep 600", {}, "py-spy took longer than 0.3 s there"),
        (None, {}, NOT_INSTALLED),
    ],
    ids=["stacks", "not allowed", "gone", "slow", "not installed"],
)
def test_what_py_spy_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, stacks: dict[int, str], note: str
) -> None:
    if script is not None:
        (tmp_path / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    if script is None:
        monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(children, "SPY_S", 0.3 if note.startswith("py-spy took") else 60.0)
    assert asyncio.run(asyncio.wait_for(spy([7, 9]), 120)) == (stacks, note)


CALLS = {"x86_64": {"read": 0, "close": 3, "futex": 202}, "aarch64": {"read": 63, "close": 57, "futex": 98}}


@pytest.mark.skipif(os.uname().machine not in CALLS, reason="the numbers of its system calls are not known here")
@pytest.mark.parametrize(
    ("call", "what", "expected"),
    [("read", "file", True), ("close", "pipe", True), ("read", "pipe", False), ("read", "/dev/null", False),
     ("futex", "file", False), ("", "file", False)],
)  # fmt: skip
def test_a_rank_held_at_a_file_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, what: str, expected: bool
) -> None:
    with contextlib.ExitStack() as stack:
        ends = os.pipe() if what == "pipe" else [os.open(str(tmp_path / "x") if what == "file" else what, os.O_CREAT)]
        for end in ends:
            stack.callback(os.close, end)
        said = f"{CALLS[os.uname().machine][call]} 0x{ends[0]:x} 0x0\n" if call else "running\n"
        monkeypatch.setattr(children, "read_text", lambda path: said)
        assert is_at_a_file(os.getpid()) is expected


# Bytes over TCP are found in the kernel, whoever holds the connection.


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_what_is_sent_and_received_counts_by_family_once(family: socket.AddressFamily, host: str) -> None:
    me = os.getpid()
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError as error:
            pytest.skip(f"{host}: {error}")
        server.listen()
        with socket.socket(family) as here:
            here.connect(server.getsockname())
            there, _ = server.accept()
            with there:
                before = transferred({0: [me]})
                here.sendall(b"x" * 10_000)
                assert len(there.recv(10_000, socket.MSG_WAITALL)) == 10_000
                # What a forked child holds too is the same connection.
                after = transferred({0: [me, me], 1: [1 << 22]})
    assert before is not None
    assert after is not None
    # Both ends are ours; the last acknowledgement may still be on its way.
    assert 10_000 <= after[0] - before[0] <= 20_000
    assert after[1] == 0


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_silent_addresses_are_distinguished_from_those_that_answer(family: socket.AddressFamily, host: str) -> None:
    me = os.getpid()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(family))
        try:
            server.bind((host, 0))
        except OSError as error:
            pytest.skip(f"{host}: {error}")
        server.listen(0)
        end = f"{f'[{host}]' if ':' in host else host}:{server.getsockname()[1]}"
        # The second one finds its queue full, and its SYN is dropped.
        for _ in range(2):
            dialling = stack.enter_context(socket.socket(family))
            dialling.setblocking(False)
            assert dialling.connect_ex(server.getsockname()) in (0, errno.EINPROGRESS)
        silent, reached = remote_ends([me])[me]
    assert (silent.count(end), reached.count(end)) == (1, 1)
    assert remote_ends([1 << 22]) == {1 << 22: ([], [])}


def make_boot(folder: Path) -> None:
    """What the engine puts there for the samplers of its ranks."""
    os.mkfifo(folder / sampler.WAKE)
    (folder / f"{worker.SAMPLER}.py").touch()


def test_ranks_of_a_job_without_sampling_say_so(tmp_path: Path) -> None:
    answer = phases.PhaseReader(tmp_path).sample([RankProcess(3, 0, os.getpid(), tmp_path)], 0, 0, routine=False)
    assert answer["off"] == {"3": "sampling is off: --no-slow, or slow = false"}


def test_a_window_has_the_connections_between_machines(tmp_path: Path) -> None:
    """Two addresses stand for two machines; what stays on one, or is hardly used, is no link."""
    make_boot(tmp_path)
    reader = phases.PhaseReader(tmp_path)
    rank = RankProcess(3, 0, os.getpid(), tmp_path)
    # It is the middle of window 7.
    shift_ns = 7 * sampler.WINDOW_NS + sampler.WINDOW_NS // 2 - time.time_ns()
    with contextlib.ExitStack() as stack:
        pairs = {}
        for host, kib in (("127.0.0.2", 4096), ("127.0.0.3", 8), ("127.0.0.1", 4096)):
            server = stack.enter_context(socket.create_server((host, 0)))
            ours = stack.enter_context(socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0)))
            pairs[host] = ours, stack.enter_context(server.accept()[0]), kib << 10
        for _ in range(3):
            reader.sample([rank], 0, shift_ns, routine=False)
            for ours, theirs, count in pairs.values():
                sending = threading.Thread(target=ours.sendall, args=(bytes(count),))
                sending.start()
                assert len(theirs.recv(count, socket.MSG_WAITALL)) == count
                sending.join()
        # Nobody reads the rest.
        ours, theirs, _ = pairs["127.0.0.2"]
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 20))
        window = {"window": 7, "looks": 9, "phases": {}, "disk_s": 0, "delay_s": 0, "processor": 0, "faults": 0,
                  "cuda": False, "sites": []}  # fmt: skip
        (tmp_path / f"3{sampler.SUFFIX}").write_text(json.dumps({"windows": [window]}))
        answer = reader.sample([rank], 0, shift_ns, routine=False)
    ((local, remote, speed, waits),) = answer["windows"]["7"]["3"]["links"]
    assert (local, remote) == ("127.0.0.1", "127.0.0.2")
    assert speed > 0.01
    assert 0 < waits < 1


@pytest.mark.parametrize("is_free", [False, True], ids=["all its processors are busy", "one of them is free"])
def test_who_takes_the_processor_of_a_rank_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_free: bool
) -> None:
    """Two processes share a processor; if the rank might run on another one, nobody keeps it from that."""
    make_boot(tmp_path)
    core = min(os.sched_getaffinity(0))
    began = time.monotonic()
    idle = {core: 0 if not is_free else 10**6}
    monkeypatch.setattr(phases, "idle_ticks", lambda: {core: int(idle[core] * (time.monotonic() - began))})
    burn = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"]
    reader = phases.PhaseReader(tmp_path)
    with subprocess.Popen(burn) as own, subprocess.Popen(burn) as taker:
        try:
            rank, found = RankProcess(3, 0, own.pid, tmp_path), []
            for number in range(1, 200):
                window = {"window": number, "looks": 9, "phases": {}, "disk_s": 0, "delay_s": 5.0, "processor": core,
                          "faults": 0, "cuda": False, "sites": []}  # fmt: skip
                (tmp_path / f"3{sampler.SUFFIX}").write_text(json.dumps({"windows": [window]}))
                answer = reader.sample([rank], 0, 0, routine=False)
                found.append(answer["windows"][str(number)]["3"]["taken"])
                if found[-1] is not None or (is_free and number == 10):
                    break
                time.sleep(0.1)
        finally:
            own.kill()
            taker.kill()
    if is_free:
        assert found == [None] * 10
    else:
        assert found[-1] is not None
        # Whatever else this machine does may use more of it.
        assert found[-1]["pid"] != own.pid
        assert found[-1]["share"] >= phases.BUSY


@pytest.mark.parametrize(
    ("entry", "folder", "text"),
    [
        ("4:cpu,cpuacct:/slice/job", "cpu", "nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000\n"),
        ("0::/slice/job", "", "usage_usec 88\nnr_throttled 3\nthrottled_usec 1500000\n"),
    ],
    ids=["v1", "v2"],
)
def test_the_time_for_which_cgroups_throttle_is_that_of_all_above(
    tmp_path: Path, entry: str, folder: str, text: str
) -> None:
    for path, content in (("proc/4711/cgroup", f"{entry}\n"), (f"sys/fs/cgroup/{folder}/slice/job/cpu.stat", text),
                          (f"sys/fs/cgroup/{folder}/slice/cpu.stat", text)):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert phases.throttled_s(4711, tmp_path) == pytest.approx(3.0)
    assert phases.throttled_s(4712, tmp_path) == 0


# What is read of a rank's stack and flight record: where it waits, and how far it has come.


TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
LOGGER = f"{TORCH}/distributed/c10d_logger.py"
DCP = f"{TORCH}/distributed/checkpoint"


def stack(*frames: tuple[str, str]) -> str:
    """A dump of Python's, with another thread first; `frames`: file and function, the innermost one first."""
    lines = "\n".join(f'  File "{file}", line 7 in {name}' for file, name in frames)
    return f'Thread 0x1 (most recent call first):\n  File "/x.py", line 1 in run\n\nThread 0x2:\n{lines}\n'


@pytest.mark.parametrize(
    ("frames", "inside"),
    [
        ([(C10D, "all_reduce"), (LOGGER, "wrapper")], "all_reduce"),
        ([(C10D, "_store_based_barrier"), (C10D, "init_process_group")], "init_process_group"),
        ([(f"{TORCH}/_ops.py", "__call__"), (f"{TORCH}/distributed/_functional_collectives.py", "wait_tensor")],
         "wait_tensor"),
        ([(f"{TORCH}/distributed/pipelining/schedules.py", "_wait_batch_p2p")], "_wait_batch_p2p"),
        ([(C10D, "gather_object"), (f"{DCP}/utils.py", "reduce_scatter"), (f"{DCP}/saver.py", "save")], "save"),
        ([(f"{TORCH}/serialization.py", "_save"), (f"{DCP}/filesystem.py", "_write_item"), (f"{DCP}/saver.py", "save")],
         None),
        ([(f"{DCP}/filesystem.py", "_write_files_from_queue"), (f"{DCP}/saver.py", "save")], None),
        ([(C10D, "_object_to_tensor"), (C10D, "all_gather_object")], None),
        ([(f"{TORCH}/nn/modules/linear.py", "forward"), (f"{TORCH}/distributed/fsdp/api.py", "forward")], None),
        ([("/usr/lib/python3.11/threading.py", "wait"), (C10D, "all_reduce")], None),
        ([], None),
    ],
)  # fmt: skip
def test_not_all_of_torch_distributed_waits(frames: list[tuple[str, str]], inside: str | None) -> None:
    assert read_stack(stack(*frames, ("/home/u/train.py", "<module>")))["inside"] == inside


def test_what_the_script_runs_itself_is_shown_from_the_outermost_function_on() -> None:
    own = [("/home/u/model.py", "one"), ("/home/u/train.py", "spin"), ("/home/u/train.py", "<module>")]
    runner = ("<frozen runpy>", "_run_code")
    shown = [("train.py", 7, "<module>"), ("train.py", 7, "spin"), ("model.py", 7, "one")]
    assert read_stack(stack(*own, runner))["script"] == shown
    assert read_stack(stack((f"{TORCH}/nn/modules/linear.py", "forward"), *own))["script"] == []
    assert len(read_stack(stack(*[own[0]] * 500))["script"]) == MAX_FRAMES


def test_the_lines_around_a_frame_are_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("".join(f"line {number}  \n" for number in range(1, 12)))
    monkeypatch.chdir(tmp_path)
    frame = read_stack(stack((f"{TORCH}/nn/modules/linear.py", "forward"), ("train.py", "main")))["frame"]
    assert frame == ("train.py", 7)
    assert read_source(os.getpid(), *frame) == {"first": 3, "text": "\n".join(f"line {n}" for n in range(3, 12))}
    assert read_source(os.getpid(), str(tmp_path / "train.py"), 1) == {
        "first": 1,
        "text": "\n".join(f"line {n}" for n in range(1, 6)),
    }
    # The file was replaced by a shorter one, or is no file.
    assert (read_source(os.getpid(), "train.py", 12), read_source(os.getpid(), "<string>", 1)) == (None, None)


THREADING = "/usr/lib/python3.12/threading.py"


@pytest.mark.parametrize(
    ("frames", "over"),
    [
        ([(THREADING, "_shutdown")], True),
        ([(THREADING, "join"), ("/usr/lib/python3.12/concurrent/futures/thread.py", "_python_exit"),
          (THREADING, "_shutdown")], True),
        ([(THREADING, "join"), ("/home/u/train.py", "<module>")], False),
        ([("/home/u/server.py", "_shutdown")], False),
        ([(THREADING, "_shutdown"), ("/home/u/train.py", "<module>")], False),
        ([], False),
    ],
)  # fmt: skip
def test_a_script_is_over_when_only_pythons_shutdown_is_on_its_stack(frames: list[tuple[str, str]], over: bool) -> None:
    assert read_stack(stack(*frames))["over"] is over


def trace_of(name: str, *, message: str, line: int = 3) -> str:
    return (
        f'Traceback (most recent call last):\n  File "/home/u/{name}", line {line}, in <module>\n    x()\n{message}\n'
    )


def test_the_exception_of_a_finished_script_comes_before_that_of_a_thread(tmp_path: Path) -> None:
    thread = "Exception in thread Thread-1 (feed):\n" + trace_of("feed.py", message="KeyError: 7")
    script = trace_of("train.py", message="ValueError: no lr")
    (tmp_path / "stderr.log").write_text(f"start\n{script}{thread}")
    reported = ended_part(tmp_path, is_over=True)
    # A script may print such a text and end well: only the error file tells that it has ended so.
    assert reported is not None
    assert (reported["part"], reported["headline"]) == ("a thread", "KeyError: 7")
    error = {"message": {"message": "ValueError: no lr", "extraInfo": {"py_callstack": script, "timestamp": "1"}}}
    (tmp_path / "error.json").write_text(json.dumps(error))
    reported = some(ended_part(tmp_path, is_over=True))
    assert {**reported, "age_s": 0} == {
        "part": "the script", "type": "ValueError", "headline": "ValueError: no lr", "place": "train.py:3",
        "traceback": script.rstrip(), "line": 5, "age_s": 0,
    }  # fmt: skip
    # While the script runs, an error file of torch's `record` may tell of an exception that it has caught.
    reported = some(ended_part(tmp_path, is_over=False))
    assert (reported["part"], reported["line"]) == ("a thread", 10)
    (tmp_path / "stderr.log").write_text("nothing\n")
    reported = some(ended_part(tmp_path, is_over=True))
    assert (reported["headline"], reported["line"]) == ("ValueError: no lr", None)
    assert ended_part(tmp_path, is_over=False) is None


GONE = ("profiling_name", "time_created_ns")


def entry(number: int, *, retired: bool = True, pg_id: int = 0, backend: str = "gloo") -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"], "pg_id": pg_id, "collective_seq_id": number, "retired": retired,
        "time_created_ns": 10**9, "profiling_name": f"{backend}:all_reduce", "state": "scheduled",
    }  # fmt: skip


def read(*entries: dict[str, Any]) -> Any:
    return flight(*entries)["0"]


def flight(*entries: dict[str, Any]) -> dict[str, Any]:
    return read_flight(merged_records([json.dumps({"entries": entries}).encode()]), 2 * 10**9)


def test_a_group_that_is_created_again_counts_from_the_start() -> None:
    old = [entry(number, retired=number < 9) for number in range(1, 10)]
    assert read(*old)["seq"] == 9
    again = read(*old, entry(1, pg_id=1), entry(2, pg_id=1))
    assert (again["last"], again.get("seq"), again["came"]["first"]) == (2, None, 1)
    # Two backends of one group count each for itself.
    both = flight(entry(3), entry(9, pg_id=1, backend="nccl", retired=False), entry(4))
    assert (both["0"]["last"], both["0"].get("seq"), both["0"]["came"]["first"]) == (4, None, 3)
    assert (both["0/nccl"]["last"], both["0/nccl"]["seq"], both["0/nccl"]["came"]["first"]) == (9, 9, 9)


def test_a_flight_record_entry_without_a_name_or_a_time_still_counts() -> None:
    bare = [{key: value for key, value in entry(7, retired=False).items() if key != gone} for gone in GONE]
    seen = [read(entry(6), one) for one in bare]
    assert [(one["last"], one["seq"], one["op"], one["age_s"]) for one in seen] == [
        (7, 7, "collective", 1.0),
        (7, 7, "all_reduce", 0.0),
    ]
    assert [one["came"]["first"] for one in seen] == [6, 6]


@pytest.mark.parametrize(
    "changes", [{"collective_seq_id": 1e400}, {"process_group": []}, {"timeout_ms": "10"}, {"time_created_ns": [1]}]
)
def test_a_flight_record_of_another_format_is_left_out(changes: dict[str, Any]) -> None:
    assert flight(entry(6), {**entry(7), **changes}) == {}


def test_a_pulse_has_the_last_step_that_its_rank_printed() -> None:
    reader = StepReader()
    reader.feed("stdout", b"[100/500] loss: 0.5\n", 1)
    seen = {3: {"step": reader.step, **reader.figures.values()}}
    found = local_workers.with_steps(seen, {"3": {"t": 1.0}, "4": {"t": 1.0}})
    assert found == {"3": {"t": 1.0, "step": [None, 0.5]}, "4": {"t": 1.0, "step": None}}

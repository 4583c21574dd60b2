"""Diagnose: what one rank's evidence says. Tracebacks and crashes come from real Python processes.

In: scripts that fail, texts in the shape of torch's messages. Out: exceptions, places, categories, exits in words.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from remote_agent.diagnose.evidence import RankEvidence
from remote_agent.diagnose.exits import decode_exit
from remote_agent.diagnose.findings import FINE, UNEXPLAINED, read_rank
from remote_agent.diagnose.tracebacks import find_traces, last_background_failure
from remote_agent.text.shapes import shape


def fail(tmp_path: Path, source: str, *options: str, name: str = "train.py") -> tuple[str, int]:
    """Run a script that fails; return its stderr and exit code."""
    script = tmp_path / name
    script.write_text(source)
    command = [sys.executable, *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr, done.returncode


def ended(tail: str, code: int | None = 1, signal: str | None = None, **more: Any) -> RankEvidence:
    exit_: Any = {"rank": 3, "local_rank": 1, "pid": 4100, "code": code, "signal": signal, "t_ns": 10**18, **more}
    exit_ = {"stderr_lines": len(tail.splitlines())} | exit_ | {"tail": tail}
    return RankEvidence.from_exit(exit_, "n2", {"stderr": "/j/generation_0/rank_3/stderr.log"})


def test_an_exception_is_named_with_its_innermost_user_frame(tmp_path: Path) -> None:
    source = "import json\n\ndef load(text):\n    return json.loads(text)\n\ndef main():\n    load('{')\n\nmain()\n"
    tail, code = fail(tmp_path, source)
    found = read_rank(ended("a line before\n" + tail, code))
    assert found.category == "user_exception"
    assert found.text.startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert found.place == "train.py:4 load"
    assert found.traceback == tail.strip()
    (line,) = found.evidence
    assert (line.file, line.line) == ("/j/generation_0/rank_3/stderr.log", len(tail.splitlines()) + 1)
    assert line.text.startswith("json.decoder.JSONDecodeError")


@pytest.mark.parametrize(
    "line",
    ['  File "<frozen runpy>", line 88, in _run_code', "╭──── Traceback (most recent call last) ────╮"],
    ids=["frame", "box"],
)
def test_a_text_of_nothing_but_beginnings_of_tracebacks_takes_time_in_proportion_to_its_length(line: str) -> None:
    def needed_s(lines: int) -> float:
        begun = time.process_time()
        assert find_traces("\n".join([*[line] * lines, "done, 3 files"])) == []
        return time.process_time() - begun

    assert needed_s(2000) < 8 * 5 * max(needed_s(250), 0.005)


def test_exceptions_of_threads_tasks_and_children_are_distinguished_from_printed_ones(tmp_path: Path) -> None:
    source = """
import asyncio, gc, multiprocessing, threading, traceback
def fail(part):
    try:
        {}[part]
    except KeyError as error:
        raise ValueError(part) from error
async def main():
    asyncio.ensure_future(asyncio.to_thread(fail, "task"))
    asyncio.get_running_loop().call_soon(fail, "callback")
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0.01)
    gc.collect()
if __name__ == "__main__":
    thread = threading.Thread(target=fail, args=("thread",))
    thread.start()
    thread.join()
    asyncio.run(main())
    child = multiprocessing.get_context("fork").Process(target=fail, args=("child",))
    child.start()
    child.join()
    try:
        fail("print")
    except ValueError:
        traceback.print_exc()
"""
    text, _ = fail(tmp_path, source)
    found = {(trace.message, trace.background) for trace in find_traces(text) if trace.type == "ValueError"}
    assert found == {
        ("thread", "a thread"), ("task", "an asyncio task"), ("callback", "an asyncio callback"),
        ("child", "a child process"), ("print", ""),
    }  # fmt: skip
    last = last_background_failure(text)
    assert last is not None
    assert last.message == "child"


def test_of_chained_exceptions_the_deliberate_one_is_named_unless_another_says_more(tmp_path: Path) -> None:
    wrapped, _ = fail(
        tmp_path, "try:\n    {}['lr']\nexcept KeyError as e:\n    raise ValueError('no lr in the config') from e\n"
    )
    assert [trace.type for trace in find_traces(wrapped)] == ["KeyError", "ValueError"]
    found = read_rank(ended(wrapped))
    assert found.headline == "ValueError: no lr in the config (from KeyError: 'lr')"
    assert found.traceback == wrapped.strip()
    full, _ = fail(
        tmp_path,
        "try:\n    raise OSError(28, 'No space left on device', '/ckpt/1.pt')\n"
        "except OSError:\n    raise RuntimeError('cannot save')\n",
    )
    found = read_rank(ended(full))
    assert (found.category, found.place) == ("disk_full", "train.py:2")


def test_a_traceback_with_rank_tags_or_without_its_beginning_is_read(tmp_path: Path) -> None:
    tail, _ = fail(tmp_path, "def step():\n    raise ValueError('bad batch 17')\n\nstep()\n")
    tagged = "".join(f"[rank3]: {line}" for line in tail.splitlines(keepends=True))
    assert read_rank(ended(tagged)).text == "ValueError: bad batch 17 in train.py:2 step"
    cut = "\n".join(tail.splitlines()[3:])
    assert read_rank(ended(cut)).text == "ValueError: bad batch 17 in train.py:2 step"
    assert read_rank(ended(tail.splitlines()[-1])).text == "ValueError: bad batch 17"


def test_a_syntax_error_and_an_import_error_have_places(tmp_path: Path) -> None:
    tail, _ = fail(tmp_path, "def f(:\n    pass\n")
    found = read_rank(ended(tail))
    assert (found.category, found.place) == ("user_exception", "train.py:1")
    assert found.headline.startswith("SyntaxError")
    tail, _ = fail(tmp_path, "import no_such_module_here\n")
    found = read_rank(ended(tail))
    assert found.category == "permission_import_missing_module"
    assert found.text == "ModuleNotFoundError: No module named 'no_such_module_here' in train.py:1"


def test_error_json_is_preferred_and_found_again_in_the_text(tmp_path: Path) -> None:
    tail, _ = fail(tmp_path, "raise ValueError('bad batch')\n")
    late = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nOSError: late\n'
    noise = f"{tail}Exception ignored in atexit\n{late}"
    error = {"message": "ValueError: bad batch", "callstack": tail, "timestamp_ns": 5}
    found = read_rank(ended(noise, error=error))
    assert found.text == "ValueError: bad batch in train.py:1"
    assert found.evidence[0].line == len(tail.splitlines())
    assert found.t_ns == 5
    alone = read_rank(ended("", error={**error, "callstack": None}))
    assert alone.text == "ValueError: bad batch"


def test_a_crash_of_a_real_process_is_placed_by_faulthandler(tmp_path: Path) -> None:
    source = "import ctypes\n\ndef kernel():\n    ctypes.string_at(0)\n\nkernel()\n"
    tail, code = fail(tmp_path, source, "-X", "faulthandler")
    assert code == -11
    found = read_rank(ended(tail, None, "SIGSEGV", core=True))
    assert (found.category, found.place) == ("segfault", "train.py:4 kernel")
    assert found.headline == "killed by SIGSEGV (invalid memory access); core dumped"
    assert found.traceback is not None
    assert found.traceback.startswith("Fatal Python error")


@pytest.mark.parametrize(
    ("text", "category"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity",
            "cuda_oom",
        ),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "cuda_error"),
        ("RuntimeError: CUDA error: device-side assert triggered", "cuda_error"),
        ("RuntimeError: DataLoader worker (pid 991) is killed by signal: Killed. ", "dataloader_worker_killed"),
        ("OSError: [Errno 28] No space left on device: '/ckpt/step_100.pt'", "disk_full"),
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "checkpoint_corrupt",
        ),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen. port: 29500, EADDRINUSE",
            "port_in_use",
        ),
        (
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running ALLREDUCE",
            "collective_desync",
        ),
        ("ValueError: Loss is nan at step 44", "nan_loss"),
        ("zipfile.BadZipFile: File is not a zip file", "checkpoint_corrupt"),
        ("RuntimeError: No CUDA GPUs are available", "cuda_error"),
        ("RuntimeError: The NVIDIA driver version is insufficient for CUDA runtime version", "torch_version_mismatch"),
        ("PermissionError: [Errno 13] Permission denied: '/data/train'", "permission_import_missing_module"),
        (
            "torch.distributed.DistBackendError: Mismatched NCCL version detected : got 2.21 want 2.26",
            "nccl_version_mismatch",
        ),
    ],
)
def test_exceptions_with_a_meaning_of_their_own_are_causes(text: str, category: str) -> None:
    tail = f'Traceback (most recent call last):\n  File "/w/train.py", line 88, in forward\n    go()\n{text}\n'
    found = read_rank(ended(tail))
    assert (found.category, found.role) == (category, "primary")
    assert found.place == "train.py:88 forward"
    assert found.hint


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: x", "HF_HUB_OFFLINE"),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error. Access to model x is restricted.", "HF_TOKEN"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 262144", "num_stages"),
    ],
)
def test_an_exception_whose_class_says_what_to_do_has_that_advice(text: str, advice: str) -> None:
    found = read_rank(ended(f'Traceback (most recent call last):\n  File "/w/train.py", line 8, in <module>\n{text}\n'))
    assert found.category == "user_exception"
    assert advice in found.hint


@pytest.mark.parametrize(
    ("text", "category"),
    [
        (
            "RuntimeError: [/gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.3]:40112",
            "gloo_connection_reset",
        ),
        ("RuntimeError: Connection reset by peer", "gloo_connection_reset"),
        (
            "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
            "nccl_remote_error",
        ),
        (
            "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 3/4 clients joined.",
            "rendezvous_timeout",
        ),
        (
            "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed",
            "gloo_connection_reset",
        ),
    ],
)
def test_broken_connections_mark_victims(text: str, category: str) -> None:
    tail = f'Traceback (most recent call last):\n  File "/w/train.py", line 88, in step\n    go()\n{text}\n'
    found = read_rank(ended(tail))
    assert (found.category, found.role) == (category, "secondary")


def test_before_a_broken_connection_an_own_error_in_the_text_counts() -> None:
    tail = (
        "CUDA error: an illegal memory access was encountered\n"
        'Traceback (most recent call last):\n  File "a.py", line 8, in f\nRuntimeError: Connection closed by peer\n'
    )
    assert read_rank(ended(tail)).category == "cuda_error"


def test_the_reason_of_an_abort_is_above_it() -> None:
    watchdog = (
        "[rank3]:[E1120 10:00:00 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: x\n"
    )
    after = "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    assert read_rank(ended(watchdog + after, None, "SIGABRT")).category == "nccl_timeout_watchdog"
    assert read_rank(ended("double free or corruption (out)\n", None, "SIGABRT")).category == "sigabrt"
    assert read_rank(ended("", None, "SIGABRT")).category == "sigabrt"


def test_a_kill_is_called_out_of_memory_only_with_evidence() -> None:
    killed = ended("step 3\n", None, "SIGKILL")
    bare = read_rank(killed)
    assert bare.category == "other"
    assert bare.headline == "killed by SIGKILL from outside (not by supervisor)"
    assert "dmesg" in bare.hint
    assert not bare.proven
    assert bare.evidence[0].text == "step 3"
    noted = ended("[W1121 15:42:23.187464347 socket.cpp:207] [c10d] x\n", None, "SIGKILL")
    noted = dataclasses.replace(noted, exit={**(noted.exit or {}), "said": {"text": "step=9", "line": 41}})
    assert [(one.text, one.line) for one in read_rank(noted).evidence] == [("step=9", 41)]
    asked = read_rank(dataclasses.replace(killed, exit={**(killed.exit or {}), "sent": "SIGKILL"}))
    assert (asked.headline, "dmesg" in asked.hint) == ("killed by SIGKILL, sent by an operator", False)
    other = read_rank(killed, ["kernel: oom-kill:constraint=CONSTRAINT_MEMCG", "kernel: Killed process 77 (python)"])
    assert (other.category, other.proven) == ("host_oom_kill", False)
    own = read_rank(killed, ["kernel: Memory cgroup out of memory: Killed process 4100 (python)"])
    assert (own.category, own.proven) == ("host_oom_kill", True)
    assert own.evidence[0].text.endswith("4100 (python)")


def test_exits_without_output() -> None:
    silent = read_rank(ended("loading data\n", 3))
    assert silent.role == UNEXPLAINED
    assert silent.headline == "exited with code 3, last line of stderr: loading data"
    assert silent.evidence[0].text == "loading data"
    assert read_rank(ended("Traceback-free\n", 0)).role == FINE
    assert read_rank(RankEvidence(0, "n1", tail="step 5\n")).role == FINE


@pytest.mark.parametrize(
    ("code", "signal", "words"),
    [
        (0, None, "exited with code 0"),
        (1, None, "exited with code 1"),
        (None, "SIGKILL", "killed by SIGKILL (forced)"),
        (-11, None, "killed by SIGSEGV (invalid memory access)"),
        (-7, "SIGBUS", "killed by SIGBUS (memory without backing storage, for example because /dev/shm is full)"),
        (137, None, "exited with code 137, which is how a shell reports SIGKILL (forced)"),
        (200, None, "exited with code 200"),
        (255, None, "exited with code 255"),
        (None, None, "ended in an unknown way"),
    ],
)
def test_exits_in_words(code: int | None, signal: str | None, words: str) -> None:
    assert decode_exit(code, signal) == words


def test_shapes_forget_what_differs_between_ranks() -> None:
    one = shape("no file /data/n1/shard_03.bin at 0x7f00aa (attempt 3 of 10)")
    assert one == shape("no file /data/node22/shard_17.bin at 0x7e11bb (attempt 4 of 10)")
    assert one != shape("no directory /data/n1/shard_03.bin at 0x7f00aa (attempt 3 of 10)")

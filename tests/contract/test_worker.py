"""A script runs under the bootstrap exactly as `python -u SCRIPT ARGS` runs it: same bytes, same exit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_agent.engine.worker import has_clients, stop_serving
from remote_agent.wire import CallFailed
from tests.agents.engine_process import SCRIPTS, SharedEngine


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    with SharedEngine(tmp_path_factory.mktemp("worker")).running() as one:
        yield one


def test_a_signal_while_the_last_asker_is_waited_for_leaves_no_words(tmp_path: Path) -> None:
    """A script's handler that raises, as most do, is no failure of ours to be printed at its end."""
    path = str(tmp_path / "0.sock")

    def leave(_number: int, _frame: object) -> None:
        asker.close()
        accepted.close()
        sys.exit(143)

    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as asker:
        server.bind(path)
        server.listen()
        asker.connect(path)
        accepted, _ = server.accept()
        assert has_clients(path)
        before = signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            stop_serving(path, path, os.getpid())
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert not has_clients(path)


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """A copy of the scripts: what Python writes beside them stays there."""
    return Path(shutil.copytree(SCRIPTS, tmp_path / "tree"))


def plainly(cwd: Path, *words: str) -> tuple[int, bytes, bytes]:
    """Run what torchrun would run; a negative status is a signal."""
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(cwd.parent / "error.json")}
    done = subprocess.run([sys.executable, "-u", *words], cwd=cwd, env=env, capture_output=True, check=False)
    return done.returncode, done.stdout, done.stderr


def status(ended: dict[str, Any]) -> int:
    if ended["signal"] is None:
        return int(ended["code"])
    return -int(getattr(__import__("signal"), ended["signal"]))


def same(shared: SharedEngine, cwd: Path, script: str, *args: str, kind: str = "script") -> Any:
    """Run both ways and compare all three; returns the exit document."""
    words = ["-m", script, *args] if kind == "module" else [script, *args]
    code, out, err = plainly(cwd, *words)
    ended, our_out, our_err = shared.run(script, *args, kind=kind, cwd=str(cwd))
    assert our_err.decode("utf-8", "replace") == err.decode("utf-8", "replace")
    assert our_out == out
    assert status(ended) == code
    return ended


def test_an_exception_is_printed_as_ever_and_recorded_in_torchs_form(shared: SharedEngine, cwd: Path) -> None:
    ended = same(shared, cwd, "deep.py")
    assert ended["code"] == 1
    assert ended["error"]["message"] == "RuntimeError: the failure"
    assert ended["error"]["callstack"].rstrip() == ended["tail"].rstrip()
    assert ended["stopped_by_us"] is False
    assert abs(ended["error"]["timestamp_ns"] - ended["t_ns"]) < 2_000_000_000


def test_an_error_file_can_be_read_by_torch_itself(shared: SharedEngine, cwd: Path) -> None:
    shared.run("deep.py", cwd=str(cwd))
    reader = (
        "import json, sys\n"
        "from torch.distributed.elastic.multiprocessing.errors import ProcessFailure\n"
        "failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=sys.argv[1])\n"
        "print(json.dumps([failure.message, failure.timestamp]))\n"
    )
    path = shared.newest() / "error.json"
    done = subprocess.run([sys.executable, "-c", reader, path], capture_output=True, check=True)
    message, timestamp = json.loads(done.stdout)
    assert message["message"] == "RuntimeError: the failure"
    assert "in inner" in message["extraInfo"]["py_callstack"]
    assert timestamp == int(message["extraInfo"]["timestamp"])


@pytest.mark.parametrize(
    ("script", "args", "kind", "code", "message"),
    [
        ("bad_syntax.py", "", "script", 1, "SyntaxError: '(' was never closed"),
        ("{cwd}/bad_syntax.py", "", "script", 1, "SyntaxError: '(' was never closed"),
        ("nowhere.py", "", "script", 2, "FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.py'"),
        ("no_such_module", "", "module", 1, ""),
        ("pkg.fails", "a -b", "module", 1, "RuntimeError: from a module"),
        ("own_hook.py", "", "script", 1, "KeyError: 'who records this?'"),
        ("only_printed.py", "", "script", 0, ""),
        ("broken.py", "", "script", 1, ""),
        ("spawns.py", "", "script", 0, ""),
        ("imports_torch.py", "", "script", 0, ""),
        *(("ends.py", way, "script", None, "") for way in ("exit3", "message", "os_exit", "interrupt", "thread")),
        *(("ends.py", way, "script", None, "") for way in ("none", "nothing", "SIGKILL", "SIGTERM")),
    ],
)
def test_it_ends_as_ever_and_what_failed_is_recorded(
    shared: SharedEngine, cwd: Path, script: str, args: str, kind: str, code: int | None, message: str
) -> None:
    (cwd / "bad_syntax.py").write_text("x = (1,\ny = 2\n")
    (cwd / "broken.py").write_text(
        "import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{\"message\": {')\nos._exit(1)\n"
    )
    ended = same(shared, cwd, script.format(cwd=cwd), *args.split(), kind=kind)
    assert code in (None, ended["code"])
    assert ((ended["error"] or {}).get("message") or "").startswith(message)
    assert bool(message) == (ended["error"] is not None)
    assert "worker" not in str(ended["error"])


def test_a_folder_and_an_archive_are_run(shared: SharedEngine, cwd: Path) -> None:
    same(shared, cwd, "folder", "x")
    with zipfile.ZipFile(cwd / "app.pyz", "w") as archive:
        archive.write(cwd / "folder" / "__main__.py", "__main__.py")
    same(shared, cwd, "app.pyz", "x")


def test_a_script_behind_a_link_finds_its_neighbours(shared: SharedEngine, cwd: Path) -> None:
    (cwd / "elsewhere").mkdir()
    (cwd / "elsewhere" / "linked.py").symlink_to(cwd / "folder" / "__main__.py")
    (cwd / "where.py").write_text("import sys; print(sys.path[0], __file__, sys.argv)")
    (cwd / "elsewhere" / "where.py").symlink_to(cwd / "where.py")
    same(shared, cwd, "elsewhere/where.py")


def test_a_segmentation_fault_leaves_a_python_stack(shared: SharedEngine, cwd: Path) -> None:
    ended, _, err = shared.run("segv.py", cwd=str(cwd))
    assert ended["signal"] == "SIGSEGV"
    assert ended["code"] is None
    assert b"segv.py" in err


def test_the_scripts_own_record_wins(shared: SharedEngine, cwd: Path) -> None:
    (cwd / "recorded.py").write_text(
        "import json, os\n"
        "with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "    json.dump({'message': {'message': 'mine', 'extraInfo': {'py_callstack': 'x', 'timestamp': '5'}}}, file)\n"
        "raise ValueError('not this')\n"
    )
    ended = same(shared, cwd, "recorded.py")
    assert ended["error"] == {"message": "mine", "callstack": "x", "timestamp_ns": 5_000_000_000}


def test_every_byte_is_kept(shared: SharedEngine, cwd: Path) -> None:
    ended = same(shared, cwd, "bytes_out.py")
    assert ended["stderr_lines"] > 2000
    assert len(ended["tail"].splitlines()) >= 40


def test_data_loader_workers(shared: SharedEngine, cwd: Path) -> None:
    ended, out, _ = shared.run("loaders.py", cwd=str(cwd))
    assert ended["code"] == 0
    batches = "[[0, 1, 4, 9], [16, 25, 36, 49]]"
    assert out.decode() == f"fork {batches}\nspawn {batches}\n"


def test_the_engine_learns_how_long_init_process_group_took_and_the_script_does_not(
    shared: SharedEngine, cwd: Path
) -> None:
    same(shared, cwd, "groups.py")
    generation = int(shared.newest().parent.name.rpartition("_")[2])
    found = shared.engine.grouped[generation, 0]
    assert 0 < found["took_s"] < (found["t_ns"] - shared.engine.mains[generation, 0]) / 1e9
    same(shared, cwd, "groups.py", "fails")
    assert (generation + 1, 0) not in shared.engine.grouped


def test_a_torch_that_does_not_import_fails_as_ever(shared: SharedEngine, cwd: Path) -> None:
    package = cwd / "torch" / "distributed"
    package.mkdir(parents=True)
    (cwd / "torch" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("import nothing_like_this\n")
    (cwd / "broken_torch.py").write_text("import torch.distributed\n")
    ended = same(shared, cwd, "broken_torch.py")
    assert ended["error"]["message"] == "ModuleNotFoundError: No module named 'nothing_like_this'"


def test_a_system_wide_sitecustomize_still_runs(shared: SharedEngine, cwd: Path) -> None:
    (cwd / "site").mkdir()
    (cwd / "site" / "sitecustomize.py").write_text("import sys; sys.from_site = __file__\n")
    (cwd / "site" / "fails").mkdir()
    (cwd / "site" / "fails" / "sitecustomize.py").write_text("1 / 0\n")
    (cwd / "look.py").write_text(
        "import sys, os\n"
        "print(getattr(sys, 'from_site', None), 'sitecustomize' in sys.modules, sys.path, os.environ['PYTHONPATH'])\n"
    )
    for value in (str(cwd / "site"), str(cwd / "site" / "fails"), "", f":{cwd}/site"):
        done = subprocess.run(
            [sys.executable, "-u", "look.py"],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": value, "PWD": str(cwd)},
            capture_output=True,
            check=True,
        )
        ended, out, err = shared.run("look.py", cwd=str(cwd), env={"PYTHONPATH": value})
        assert (ended["code"], out, err) == (0, done.stdout, done.stderr)


def test_python_exec_is_honoured(shared: SharedEngine, cwd: Path) -> None:
    wrapper = cwd / "wrapped"
    wrapper.write_text(f'#!/bin/sh\necho wrapped\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    ended, out, _ = shared.run("ends.py", "exit3", cwd=str(cwd), env={"PYTHON_EXEC": str(wrapper)})
    assert (ended["code"], out) == (3, b"wrapped\n")


def test_run_path_runs_the_script_inside_the_interpreter(shared: SharedEngine, cwd: Path) -> None:
    (cwd / "look.py").write_text("import sys; print(__name__, sys.argv, __file__); 1 / 0\n")
    ended, out, _ = shared.run("look.py", "a b", kind="run_path", cwd=str(cwd))
    assert out == b"__main__ ['look.py', 'a b'] look.py\n"
    assert ended["error"]["message"] == "ZeroDivisionError: division by zero"


def test_logs_are_also_where_torchrun_would_put_them(shared: SharedEngine, cwd: Path) -> None:
    (cwd / "say.py").write_text("import sys; print('here'); sys.stderr.write('there')\n")
    shared.run("say.py", cwd=str(cwd), links="logs/job-1_n1")
    (attempt,) = (cwd / "logs" / "job-1_n1").iterdir()
    assert attempt.name == shared.newest().parent.name.replace("generation", "attempt")
    assert ((attempt / "0" / "stdout.log").read_text(), (attempt / "0" / "stderr.log").read_text()) == (
        "here\n",
        "there",
    )
    (cwd / "file").touch()
    with pytest.raises(CallFailed, match="--log-dir: Not a directory"):
        shared.run("say.py", cwd=str(cwd), links="file/job-1_n1")


def test_a_binding_that_this_node_cannot_make_is_refused(shared: SharedEngine, cwd: Path) -> None:
    with pytest.raises(CallFailed, match="binds each worker near its GPU, and torch sees none here"):
        shared.run("ends.py", "exit0", cwd=str(cwd), numa_binding="node")


def test_arguments_reach_the_script_untouched(shared: SharedEngine, cwd: Path) -> None:
    (cwd / "echo.py").write_text("import sys, json; print(json.dumps(sys.argv[1:]))")
    words = ["-X", "supervisor=run", "a$$b", "${local_rank}", "", " ", "--", "-u", "\u00e9", "'\"\\"]
    _, out, _ = shared.run("echo.py", *words, cwd=str(cwd))
    assert json.loads(out) == words


def test_a_program_without_python(shared: SharedEngine, cwd: Path) -> None:
    program = cwd / "program"
    look = 'echo "$RANK $1 ${PYTHONPATH-none} ${SUPERVISOR_HOME-none}"; exec grep Sig[BIC] /proc/self/status'
    program.write_text(f"#!/bin/sh\n{look}\n")
    program.chmod(0o755)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    expected = subprocess.run([program, "a"], cwd=cwd, env={**env, "RANK": "0"}, capture_output=True, check=True)
    ended, out, err = shared.run("./program", "a", kind="binary", cwd=str(cwd))
    assert ended["code"] == 0
    assert err == b""
    first, *signals = out.decode().splitlines()
    assert first == "0 a none none"
    assert len(signals) == 3
    # What is blocked, ignored and caught: as for any program.
    assert signals == expected.stdout.decode().splitlines()[1:]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("./nothing", "No such file or directory"),
        ("nothing-of-that-name", "No such program in PATH"),
        ("./windows.sh", "its first line names an interpreter that does not exist (Windows line endings?)"),
    ],
)
def test_a_program_that_cannot_be_started(shared: SharedEngine, cwd: Path, program: str, why: str) -> None:
    (cwd / "windows.sh").write_bytes(b"#!/bin/sh\r\necho\r\n")
    (cwd / "windows.sh").chmod(0o755)
    ended, _, err = shared.run(program, kind="binary", cwd=str(cwd))
    assert ended["code"] == 127
    assert err.decode() == f"{program}: {why}\n"
    assert ended["error"]["message"] == f"FileNotFoundError: [Errno 2] {why}: '{program}'"


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12", "3.13"])
def test_the_bootstrap_runs_on_other_pythons(shared: SharedEngine, cwd: Path, version: str) -> None:
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if not found:
        pytest.skip(f"no Python {version} here")
    plain = subprocess.run([found[0], "-u", "deep.py"], cwd=cwd, capture_output=True, check=False)
    ended, out, err = shared.run("deep.py", cwd=str(cwd), env={"PYTHON_EXEC": str(found[0])})
    assert (ended["code"], out, err) == (plain.returncode, plain.stdout, plain.stderr)
    assert ended["error"]["message"] == "RuntimeError: the failure"

"""What ssh asks comes to the user one question at a time, and the answer goes to ssh alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.errors import HostError
from supervisor.inventory import Host
from supervisor.ssh import openssh
from supervisor.ssh.questions import Asking, Question, Questions, questions, run_dir
from supervisor.ssh.settings import for_host

pytestmark = pytest.mark.usefixtures("ssh_home")

PASSPHRASE = "Enter passphrase for key '/k': "


class User:
    """Answers what is asked, and notes it."""

    def __init__(self, *answers: str | None) -> None:
        self.asked: list[Question] = []
        self.answers = list(answers)
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.open = 0

    async def ask(self, question: Question) -> str | None:
        """Answer a question."""
        self.open += 1
        assert self.open == 1, "one question at a time"
        self.asked.append(question)
        self.is_asked.set()
        try:
            await self.may_answer.wait()
            return self.answers.pop(0)
        finally:
            self.open -= 1


async def _ssh_asks(desk: Questions, asking: Asking, prompt: str, hint: str = "") -> tuple[int | None, bytes]:
    """Do what ssh does with a question: run the helper; returns its exit code and what it prints.

    None: there is no answer, and ssh is to be ended.
    """
    async with desk.environment(asking) as environment:
        process = await asyncio.create_subprocess_exec(
            environment["SSH_ASKPASS"],
            prompt,
            env={**environment, **({"SSH_ASKPASS_PROMPT": hint} if hint else {})},
            stdout=asyncio.subprocess.PIPE,
        )
        talking = asyncio.ensure_future(process.communicate())
        giving_up = asyncio.ensure_future(asking.gave_up.wait())
        try:
            done, _ = await asyncio.wait({talking, giving_up}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert done
            return (process.returncode, talking.result()[0]) if talking in done else (None, b"")
        finally:
            talking.cancel()
            giving_up.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("prompt", "hint", "kind", "answer", "end"),
    [
        ("(me@gate) Verification code: ", "", "secret", "123 456", (0, b"123 456\n")),
        ("a \x1b[2J\nlong question\n(yes/no/[fingerprint])? ", "", "yes_no", "yes", (0, b"yes\n")),
        ("Password: ", "", "secret", "", (0, b"\n")),
        ("Password: ", "", "secret", None, (None, b"")),
        ("Allow use of key /k?", "confirm", "yes_no", "yes", (0, b"yes\n")),
        ("Allow use of key /k?", "confirm", "yes_no", "no", (1, b"")),
    ],
)
async def test_an_answer_goes_to_ssh(
    prompt: str, hint: str, kind: str, answer: str | None, end: tuple[int, bytes]
) -> None:
    desk, user, asking = Questions(), User(answer), Asking("jump host gate", may_ask=True)
    with desk.on_screen(user.ask):
        assert await _ssh_asks(desk, asking, prompt, hint) == end
    assert user.asked == [Question("jump host gate", prompt, kind)]
    assert asking.asked == [prompt]
    assert bool(asking.unanswered) == (answer is None)
    assert [path.name for path in run_dir().iterdir()] == ["askpass"]


async def test_a_key_that_is_to_be_touched_needs_no_answer_and_ends_with_ssh() -> None:
    desk, user, asking = Questions(), User(), Asking("n1", may_ask=True)
    user.may_answer.clear()
    with desk.on_screen(user.ask):
        touching = asyncio.ensure_future(_ssh_asks(desk, asking, "Confirm user presence for key /k", "none"))
        await asyncio.wait_for(user.is_asked.wait(), 30)
        touching.cancel()
        await asyncio.gather(touching, return_exceptions=True)
        while user.open:
            await asyncio.sleep(0.01)
    assert [question.kind for question in user.asked] == ["notice"]
    assert asking.asked == []


async def test_a_passphrase_is_asked_once_for_all_hosts_and_again_only_if_it_was_wrong() -> None:
    desk, user = Questions(), User("wrong", "right")
    one, two = Asking("n1", may_ask=True, marks_hosts=True), Asking("n2", may_ask=False, marks_hosts=True)
    with desk.on_screen(user.ask):
        assert (await _ssh_asks(desk, one, PASSPHRASE))[1] == b"wrong\n"
        assert (await _ssh_asks(desk, one, PASSPHRASE))[1] == b"right\n"
        assert desk.remembers(PASSPHRASE)
        assert (await _ssh_asks(desk, two, PASSPHRASE))[1] == b"right\n"
        # ssh asks again: it was not right for this host, and nobody may be asked.
        assert await _ssh_asks(desk, two, PASSPHRASE) == (None, b"")
    assert [question.where for question in user.asked] == ["n1", "n1"]


async def test_a_host_that_asks_in_the_words_of_a_key_gets_no_passphrase() -> None:
    """An ssh before 8.5 passes on what a host asks as it is: then nobody can tell whose question it is."""
    desk, user = Questions(), User("of the key", None)
    with desk.on_screen(user.ask):
        assert (await _ssh_asks(desk, Asking("n1", True, marks_hosts=True), PASSPHRASE))[1] == b"of the key\n"
        assert await _ssh_asks(desk, Asking("n2", may_ask=False), PASSPHRASE) == (None, b"")
        assert await _ssh_asks(desk, Asking("n3", may_ask=True), PASSPHRASE) == (None, b"")
        assert desk.remembers(PASSPHRASE), "nor does such a host make it forgotten"
    assert [question.where for question in user.asked] == ["n1", "n3"]


async def test_a_password_is_never_used_for_another_host() -> None:
    desk, user = Questions(), User("first", "second")
    with desk.on_screen(user.ask):
        for name, answer in (("n1", b"first\n"), ("n2", b"second\n")):
            assert (await _ssh_asks(desk, Asking(name, may_ask=True), "(root@x) Password: "))[1] == answer
    assert [question.where for question in user.asked] == ["n1", "n2"]


async def test_questions_wait_for_each_other_and_no_deadline_runs_while_one_is_open() -> None:
    desk, user = Questions(), User("a", "b")
    user.may_answer.clear()
    askings = [Asking(name, may_ask=True) for name in ("n1", "n2")]
    with desk.on_screen(user.ask):
        work = asyncio.gather(*(_ssh_asks(desk, asking, "Password: ") for asking in askings))
        bounded = asyncio.ensure_future(desk.wait_for(work, 2.0))
        await asyncio.wait_for(user.is_asked.wait(), 30)
        before = desk.clock()
        await asyncio.sleep(0.1)  # the clock is what is tested
        assert desk.clock() == before
        assert user.open == 1
        user.may_answer.set()
        assert sorted(output for _, output in await asyncio.wait_for(bounded, 30)) == [b"a\n", b"b\n"]
    with pytest.raises(asyncio.TimeoutError):
        await desk.wait_for(asyncio.Event().wait(), 0.01)


async def test_where_nobody_can_answer_the_question_is_kept_for_the_error() -> None:
    desk, user, asking = Questions(), User(), Asking("n1", may_ask=False)
    with desk.on_screen(user.ask):
        assert await _ssh_asks(desk, asking, "Are you\nsure?") == (None, b"")
    assert (user.asked, asking.unanswered) == ([], "Are you / sure?")


async def test_what_a_killed_supervisor_has_left_goes() -> None:
    ended = await asyncio.create_subprocess_exec("true")
    await ended.wait()
    (run_dir() / f"ask.{ended.pid}").touch()
    (run_dir() / f"ask.{os.getppid()}").touch()
    desk, user = Questions(), User("x")
    with desk.on_screen(user.ask):
        await _ssh_asks(desk, Asking("n1", may_ask=True), "Password: ")
    assert sorted(path.name for path in run_dir().iterdir()) == [f"ask.{os.getppid()}", "askpass"]


async def test_a_stranger_at_the_socket_gets_nothing(ssh_home: Path) -> None:
    desk, user, asking = Questions(), User(), Asking("n1", may_ask=True)
    with desk.on_screen(user.ask):
        async with desk.environment(asking) as environment:
            assert Path(environment["SUPERVISOR_ASKPASS"]).parent.stat().st_mode & 0o077 == 0
            for data in (b"", b"{}\n", b'["other", "Password: ", ""]\n', b"x" * 100_000):
                reader, writer = await asyncio.open_unix_connection(environment["SUPERVISOR_ASKPASS"])
                with contextlib.suppress(ConnectionError):
                    writer.write(data)
                    writer.write_eof()
                    assert await asyncio.wait_for(reader.read(), 30) == b""
                writer.close()
    assert user.asked == []


BOX = Host("n1", "127.0.0.1", "127.0.0.1")


@pytest.fixture
def asking_ssh(ssh_home: Path) -> None:
    """In the place of ssh: it asks for a password, and has logged in if there is an answer."""
    program = Path(shutil.which("ssh") or "")
    real = program.with_name("real-ssh")
    program.rename(real)
    program.write_text(
        f'#!/bin/sh\ncase " $* " in *" -G "*) exec {real} "$@";; *" -O "*) exit 255;; esac\n'
        '"$SSH_ASKPASS" "Password: " >/dev/null || exit 255\n'
    )
    program.chmod(0o755)


def _log_in(may_ask: bool, said: list[str]) -> asyncio.Future[openssh.Login]:
    made = openssh.log_in("n1", for_host(BOX), (), lambda _, text: said.append(text), may_ask=may_ask)
    return asyncio.ensure_future(made)


async def test_who_may_ask_does_not_join_a_login_that_may_not(asking_ssh: None) -> None:
    user = User("open sesame")
    with questions().on_screen(user.ask):
        behind, called = _log_in(False, []), _log_in(True, [])
        with pytest.raises(HostError, match="needs your answer"):
            await asyncio.wait_for(behind, 30)
        await asyncio.wait_for(called, 30)
    assert [question.prompt for question in user.asked] == ["Password: "]


async def test_a_login_at_a_question_keeps_its_lock_and_others_do_not_wait_for_ever(
    asking_ssh: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(openssh, "OTHERS_S", 0.3)
    user, said = User("late"), list[str]()
    user.may_answer.clear()
    with questions().on_screen(user.ask):
        first = _log_in(True, [])
        await asyncio.wait_for(user.is_asked.wait(), 30)
        # `clean`, and another supervisor, while this one stands at its question.
        await openssh.end_logins([BOX])

        async def another() -> None:
            await _log_in(True, said)

        with pytest.raises(HostError, match=rf"supervisor \(process {os.getpid()}\) has been logging in there for"):
            await asyncio.to_thread(asyncio.run, another())
        assert said == [f"another supervisor (process {os.getpid()}) logs in there"]
        assert capsys.readouterr().err == f"supervisor: n1: {said[0]}; waiting for it\n"
        user.may_answer.set()
        await asyncio.wait_for(first, 30)
    await openssh.end_logins([BOX])
    assert not list(run_dir().glob("*.lock"))


@pytest.fixture
def noexec(ssh_home: Path) -> Iterator[None]:
    """No program may run where supervisor has its sockets."""
    folder = run_dir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,mode=700", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield
    subprocess.run(["umount", folder], check=True)


async def test_a_folder_where_no_program_may_run_is_passed_over(noexec: None) -> None:
    desk, user = Questions(), User("x")
    with desk.on_screen(user.ask):
        assert await _ssh_asks(desk, Asking("n1", may_ask=True), "Password: ") == (0, b"x\n")


TYPED = """
import asyncio, os, sys
from supervisor.standard_streams import ask_on_terminal

class Loop(asyncio.SelectorEventLoop):
    def add_reader(self, file, *args):
        # kqueue refuses this device on macOS.
        if os.readlink(f"/proc/self/fd/{file}") == "/dev/tty":
            raise OSError(22, "Invalid argument")
        super().add_reader(file, *args)

loop = Loop()
print(loop.run_until_complete(ask_on_terminal("name? ", visible=True)))
"""


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("setsid"), reason="simulates macOS on Linux")
def test_a_loop_that_cannot_wait_for_dev_tty_waits_for_the_terminal_itself() -> None:
    ours, theirs = pty.openpty()
    try:
        child = subprocess.Popen(
            ["setsid", "--ctty", "--wait", sys.executable, "-c", TYPED],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=theirs,
        )
        os.close(theirs)
        assert os.read(ours, 100) == b"name? "
        os.write(ours, b"Ada\n")
        assert child.communicate(timeout=60)[0] == b"Ada\n"
    finally:
        os.close(ours)

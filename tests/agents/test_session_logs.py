"""Logs that are followed over a restart and a lost link: each line once, none of what was before."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.cli import main
from supervisor.logs.files import files, read_raw
from supervisor.logs.pages import merged
from supervisor.logs.reader import LogReader
from supervisor.logs.rows import LogLine, clock_error_ms
from supervisor.logs.selection import LogQuery, RecordFilter, Selection
from supervisor.session import Session
from tests.agents.test_session import has, planned, until
from tests.agents.test_session_hosts import WAIT_S, Hosts, hosts
from tests.agents.test_session_verbs import PROGRAM, Cli
from tests.bench import odd
from tests.hostile import HOSTILE, Screen, check_harmless

# The first generation goes on until it is stopped, and says something then; the second one ends by itself.
SCRIPT = """
import os, signal, sys, time
second = os.path.exists("begun")
open("begun", "w").close()
def last(number, frame):
    print("ERROR last words", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, last)
if not second:
    print("ERROR of the first generation", file=sys.stderr, flush=True)
else:
    print("n1:7:9 [0] NCCL WARN in the script's file", flush=True)
    print("x" * 3_000_000 + "The \\x1b[1mend", flush=True)
number = 0
while not second or number < 3000:
    print(f"ERROR {second} {number}\\nfine", flush=number % 500 == 0)
    number += 1
    if not second:
        time.sleep(0.01)
"""


def test_errors_are_reported_once_over_a_restart_and_a_lost_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(made: Hosts) -> None:
        async with planned(made.inventory(), made) as session:
            reported: list[str] = []
            kept: list[str] = []
            raw = bytearray()

            async def narrow() -> None:
                chosen = Selection(streams=("stdout",), filter=RecordFilter(("^ERROR",), ("^x",)))
                async for batch in LogReader(session, LogQuery(chosen)).live(0):
                    kept.extend(row.text.decode() for row in batch.lines)

            async def follow() -> None:
                async for batch in LogReader(session, LogQuery(Selection(streams=("stdout",)), level="error")).live(0):
                    reported.extend(row.text.decode() for row in batch.lines)

            async def follow_raw() -> None:
                (file,) = [each for each in await files(session) if each["stream"] == "stdout"]
                async for data in read_raw(session, file, lambda size: None, follow=True):
                    raw.extend(data)

            await session.ready()
            following = asyncio.gather(follow(), narrow())
            await until(session, lambda: has(session, "generation_running") and bool(reported))
            following_raw = asyncio.ensure_future(follow_raw())
            await until(session, lambda: bool(raw))
            session.links["n1"].reopen()
            count, size = len(reported), len(raw)
            await until(session, lambda: not session.links["n1"].opened)
            await until(session, lambda: len(reported) > count and len(raw) > size)
            await session.request("restart")
            await asyncio.wait_for(asyncio.gather(following, following_raw), WAIT_S)
            assert session.state == "succeeded"
            assert raw == (made.home("n1") / "jobs/job-t/generation_0/rank_0/stdout.log").read_bytes()
        logs = [made.home("n1") / f"jobs/job-t/generation_{number}/rank_0/stdout.log" for number in (0, 1)]
        assert reported == [line for log in logs for line in log.read_text().splitlines() if line.startswith("ERROR")]
        assert "ERROR last words" in reported
        assert kept == reported

    with hosts(tmp_path, 1, stop_grace=60.0) as made:
        (made.work / "talk.py").write_text(SCRIPT)
        asyncio.run(scenario(made))
        cli = Cli(made, monkeypatch, capfd)
        last = [f"n1:0| ERROR True {number}" for number in range(3000)]
        assert cli("logs", "h.toml", "-f", "--level", "error", "--tail", "3").lines == last[-3:]
        assert cli("logs", "h.toml", "-f", "--level", "error").lines == last
        nccl = ["n1:0| n1:7:9 [0] NCCL WARN in the script's file"]
        assert cli("logs", "h.toml", "--stream", "nccl").lines == nccl
        assert cli("logs", "h.toml", "--stream", "nccl", "-f").lines == nccl
        assert cli("logs", "h.toml", "--stream", "all", "--tail", "9999").lines[0] == nccl[0]
        _check_grep(cli)
        _check_filter(cli)
        # The newest generation wrote nothing there.
        assert cli("logs", "h.toml", "-f", "--stream", "stderr").lines == []
        typo = cli("logs", "h.toml", "-f", "--node", "typo")
        assert (typo.status, "no host 'typo' in the inventory" in typo.err) == (1, True)


def _check_grep(cli: Cli) -> None:
    """A line of any length is searched and printed whole; capitals count only where they are asked for."""
    whole = "n1:0| " + "x" * 3_000_000 + "The \x1b[1mend"
    for words in (["--grep", "xthe end"], ["-f", "--grep", "xThe end$"], ["--tail", "6001"]):
        run = cli("logs", "h.toml", *words)
        assert (run.status, run.lines[0] == whole, len(run.lines) in (1, 6001)) == (0, True, True), words
    for more in ([], ["-f"]):
        none = cli("logs", "h.toml", *more, "--grep", "xtheEnd")
        assert (none.status, none.lines) == (1, []), more
    folded = cli("logs", "h.toml", "--fold", "--grep", "the end").lines
    assert folded == [whole[: 6 + 64 * 1024] + "… +2.9 MB"]
    assert cli("logs", "h.toml", "-f", "--fold", "--grep", "the end").lines == folded
    without = cli("logs", "h.toml", "--grep", "NCCL")
    assert (without.status, without.lines, "lines of NCCL are left out" in without.err) == (1, [], True)
    assert without.err.endswith("supervisor: no line matches --grep 'NCCL'\n")
    slow = cli("logs", "h.toml", "--grep", r"(x+)+\d")
    assert (slow.status, slow.out, "takes more than" in slow.err) == (2, b"", True)


def _check_filter(cli: Cli) -> None:
    """What is kept is the same past and live, folded or not."""
    some = [f"n1:0| ERROR True {number}" for number in range(2900, 3000) if number % 10 != 9]
    for more in ([], ["-f"], ["--level", "error"], ["-f", "--fold"]):
        kept = cli("logs", "h.toml", "--include", r"error \S+ 29\d\d$", "--exclude", "9$", *more)
        assert (kept.status, kept.lines) == (0, some), more
    last = [f"n1:0| ERROR True {number}" for number in range(2997, 3000)]
    assert cli("logs", "h.toml", "-f", "--include", "^error", "--tail", "3").lines == last
    assert cli("logs", "h.toml", "--include", "[").status == cli("logs", "h.toml", "--exclude", "(").status == 2


# A bar, a line in colour that does not end it, and one that overwrites its prefix.
HOSTILE_LINES = (
    b"\r 5%|#\r10%|##\n\x1b[31mred "
    + HOSTILE.replace("\r", "").encode(errors="surrogateescape")
    + b"\nlost\rn9:9| forged\n"
)
HOSTILE_RANK = f"import sys; sys.stdout.buffer.write({HOSTILE_LINES!r})"


def test_a_rank_owns_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with hosts(tmp_path, 1) as made:
        (made.work / "hostile.py").write_text(HOSTILE_RANK)
        cli = Cli(made, monkeypatch, capfd)

        def on_terminal(*words: str) -> str:
            screen = Screen()
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", screen)
                assert main(words) == 0
            return screen.text

        ran = on_terminal("up", "h.toml", "--headless", "--job", "job-t", "hostile.py")
        for shown in (ran, *(on_terminal("logs", "h.toml", *more) for more in ([], ["-f"], ["--fold"]))):
            check_harmless(shown, colours=True)
            bar, red, forged = shown.splitlines()
            assert (bar, forged) == ("n1:0| 10%|##", "n1:0| n9:9| forged")
            assert (red[:14], red[-3:]) == ("n1:0| \x1b[31mred", "\x1b[m")
        raw = on_terminal("logs", "h.toml", "--raw", "--rank", "0")
        assert raw.encode(errors="surrogateescape") == HOSTILE_LINES
        lines = HOSTILE_LINES.decode(errors="backslashreplace").removesuffix("\n").split("\n")
        for more in ([], ["-f"], ["--tail", "9"], ["--include", "."]):
            piped = cli("logs", "h.toml", *more).out.decode()
            assert piped == "".join(f"n1:0| {line}\n" for line in lines), more


# Both ranks do each step together, as ranks do that train, and print the same but for their number.
TOGETHER = """
import os, sys, time
rank, meeting = os.environ["RANK"], sys.argv[1]
for step in range(8):
    open(f"{meeting}/{step}_{rank}", "w").close()
    while not all(os.path.exists(f"{meeting}/{step}_{other}") for other in (0, 1)):
        time.sleep(0.002)
    print(f"step {step} loss=1.{rank}", flush=True)
    # The last two are asked for by number: no line before them arrives as late as they do.
    time.sleep(1.0 if step == 5 else 0.1)
print("rank 1 alone" if rank == "1" else "over", flush=True)
"""
STEPS = [f"[0-1]~| step {step}" for step in range(8)]


def test_ranks_that_print_alike_are_folded_past_and_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "meeting").mkdir()
    with hosts(tmp_path, 2) as made:
        (made.work / "together.py").write_text(TOGETHER)
        cli = Cli(made, monkeypatch, capfd)

        def folded(*more: str) -> list[str]:
            # Which rank is the first of a row is up to the clocks.
            return [line.partition(" loss")[0] for line in cli("logs", "h.toml", "--fold", *more).lines]

        assert cli("up", "h.toml", "--detach", "--job", "job-t", "together.py", str(tmp_path / "meeting")).status == 0
        live = folded("-f")
        last = ["n1:0| over", "n2:1| rank 1 alone"]
        assert sorted(live[-2:]) == last
        # What was there when we came and what came then is folded by itself.
        reported = [line for line in live[:-2] for _ in range(2 if line.startswith("[") else 1)]
        # A busy machine may bring one node's lines later than the other's wait for them.
        steps = sorted(int(line.rpartition(" ")[2]) for line in reported)
        assert steps == [step for step in range(8) for _ in range(2)]
        assert len(live) <= len(STEPS) + 3
        past = folded()
        assert (past[:-2], sorted(past[-2:])) == (STEPS, last)
        assert folded("-f", "--level", "info", "--tail", "18")[:-2] == STEPS
        assert folded("--grep", "step", "--tail", "4") == STEPS[-2:]


def test_lines_dropped_by_a_bound_are_reported_to_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with hosts(tmp_path, 1, log_bound=4 * 1024 * 1024) as made:
        (made.work / "flood.py").write_text("for i in range(120_000):\n    print(f'line {i:06}', 'x' * 80)\n")
        cli = Cli(made, monkeypatch, capfd)
        assert cli("up", "h.toml", "--detach", "--job", "job-t", "flood.py").status == 0
        live = cli("logs", "h.toml", "-f").lines
        raw = cli("logs", "h.toml", "--rank", "0", "--raw")
        later = cli("logs", "h.toml", "-f").lines
    assert "MB were dropped here: log_bound, or --logs of a bundle; --raw continues after them" in raw.err
    kept = [f"n1:0| {line}" for line in raw.lines]
    assert 10_000 < len(kept) < 60_000
    assert kept[-1].startswith("n1:0| line 119999 ")
    assert later[0].endswith("MB were dropped here: log_bound, or --logs of a bundle")
    assert later[1:] == kept
    assert live[-len(kept) :] == kept, "who followed lost nothing that is left"
    reported = [line for line in live if "dropped here" in line]
    assert len(reported) + sum(line.startswith("n1:0| line ") for line in live) == len(live)


def test_the_odd_one_of_512_ranks_is_on_the_screen(tmp_path: Path) -> None:
    """How soon is measured by `tests.bench odd`.

    A machine that does other things as well may read the lines of a step seconds apart, and each is a row then.
    """
    assert len(odd.measure(tmp_path, 2, nodes=2, size=(80, odd.RANKS + 40), as_one=False)) == 2


# What a machine's clock that is wrong does to all of our processes on it.
SKEWED = """
import os, time
ahead = int(os.environ["SKEW_S"])
real, real_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: real() + ahead, lambda: real_ns() + ahead * 10**9
"""
# The one clock that both share tells the true order.
TICKS = """
import os, time
while not os.path.exists("over"):
    print(time.monotonic_ns(), flush=True)
    time.sleep(0.02)
"""
# Of two measured offsets, and until the agent reads what was written, on a machine that does other things as well.
ERROR_S = 2.0
SKEW_S = {"n1": 5, "n2": -5}


def test_merged_rows_are_in_the_true_order_though_clocks_are_ten_seconds_apart(tmp_path: Path) -> None:
    def in_order(rows: list[LogLine]) -> None:
        assert {row.rank for row in rows} == {0, 1}
        assert len(rows) > 50
        latest = 0
        for row in rows:
            assert int(row.text) > latest - ERROR_S * 1e9
            latest = max(latest, int(row.text))

    async def scenario(made: Hosts) -> None:
        skewed = {name: {"prelude": f"export PYTHONPATH={site} SKEW_S={ahead}"} for name, ahead in SKEW_S.items()}
        inventory = made.inventory(**skewed)
        async with planned(inventory, made) as session:
            await session.ready()

            def apart_s() -> float:
                offsets = [float(node.get("clock_offset_ms") or 0) for node in session.status.get("nodes", ())]
                return (max(offsets) - min(offsets)) / 1000 if len(offsets) == 2 else 0.0

            def is_measured() -> bool:
                error_ms = clock_error_ms(session.status, None) or 0
                return abs(apart_s() - 10.0) < ERROR_S and 0 < error_ms < ERROR_S * 1000

            await until(session, lambda: has(session, "generation_running") and is_measured())
            while len((page := await merged(session, Selection(), 200)).rows) < 200:
                await session.wait_change(0.1)
            in_order(page.rows)
            for tree in made.root.glob("n*/trees/*"):
                (tree / "over").touch()
            await until(session, lambda: session.ended)
            assert session.state == "succeeded"
        # From the files, when nobody compares clocks any more.
        async with Session(inventory) as later:
            await later.ready()
            assert await later.settle() == []
            later.set_status(await later.call("status"))
            in_order([row async for row in LogReader(later, LogQuery(Selection())).existing()])

    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SKEWED)
    with hosts(tmp_path, 2) as made:
        (made.work / "talk.py").write_text(TICKS)
        asyncio.run(scenario(made))


def test_a_host_that_does_not_answer_keeps_no_line_of_the_others_back(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec cat > /dev/null\n")
    mute.chmod(0o755)
    with hosts(tmp_path, 1) as made:
        assert Cli(made, monkeypatch, capfd)("up", "h.toml", "--headless", "--job", "j", "talk.py", "3").status == 0
        words = {"repository": str(repository), "home": str(made.home("n1")), "work": str(made.work)}
        second = f"hosts += (Host('n2', 'localhost', '127.0.0.2', python={str(mute)!r}, local=True),)"
        program = PROGRAM.format(**words).replace("job = ", f"{second}\njob = ")
        for more in ((), ("--include", "line")):
            with subprocess.Popen(
                [sys.executable, "-c", program, "logs", "h.toml", "j", "-f", *more],
                cwd=made.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            ) as process:  # fmt: skip
                assert process.stdout is not None
                assert process.stderr is not None
                try:
                    assert process.stdout.readline() == b"n1:0| rank 0 line 0 \n"
                    assert process.stderr.readline().endswith(b"no answer yet; its log is shown once it answers\n")
                finally:
                    process.kill()

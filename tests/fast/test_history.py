"""The history of a job: its buckets, its file, what goes into it, and the series of several nodes as one."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_agent.agent.file_requests import FileRequests
from remote_agent.base.paths import Home
from remote_agent.history import keeper, pyramid, samples
from remote_agent.history.keeper import HistoryKeeper
from remote_agent.history.pyramid import BUCKETS, WIDTHS_S, History, Span, unpack
from remote_agent.logs.progress import REPORTS, REPORTS_LOOK_BACK, Reports, StepReader
from remote_agent.wire import Answer, JobSpec, NodeSpec, Problem
from supervisor.history import Series, merge, query
from supervisor.ssh.answers import MalformedAnswer, read_answer

LOSS = ("loss", 3)


def span_of(history: History, level: int, count: int) -> Span:
    return history.spans(["loss"], None, level, count)[LOSS]


@given(st.lists(st.tuples(st.integers(0, 4000), st.floats(-1e6, 1e6, width=32)), min_size=1, max_size=60))
def test_a_bucket_has_the_least_mean_and_greatest_of_its_values(values: list[tuple[int, float]]) -> None:
    values.sort(key=lambda one: one[0])
    history = History()
    for time_s, value in values:
        history.add(time_s, {LOSS: value})
    for level, width in enumerate(WIDTHS_S):
        span = span_of(history, level, BUCKETS)
        assert span.first + BUCKETS - 1 == values[-1][0] // width
        for at, number in enumerate(range(span.first, span.first + BUCKETS)):
            own = [value for time_s, value in values if time_s // width == number]
            if not own:
                assert all(math.isnan(series[at]) for series in (span.low, span.mean, span.high))
                continue
            assert (span.low[at], span.high[at]) == (min(own), max(own))
            # Each value may move the mean by a rounding of 24 bits.
            rounding = len(own) * (max(map(abs, own)) * 2**-23 + 1e-44)
            assert span.mean[at] == pytest.approx(sum(own) / len(own), rel=1e-6, abs=rounding)


def test_a_clock_that_is_set_back_loses_nothing_and_a_long_pause_leaves_no_old_values() -> None:
    history = History()
    history.add(1000, {LOSS: 1.0})
    history.add(900, {LOSS: 3.0})
    assert span_of(history, 0, 1).high[0] == 3.0
    history.add(1000 + 10 * WIDTHS_S[0] * BUCKETS, {LOSS: 5.0})
    assert [value for value in span_of(history, 0, BUCKETS).mean if not math.isnan(value)] == [5.0]


def test_a_history_is_bounded_and_the_oldest_series_give_way() -> None:
    history = History()
    for number in range(pyramid.MAX_SERIES + 3):
        history.add(number, {("loss", number): 1.0})
    assert len(history.names()) == pyramid.MAX_SERIES
    assert ("loss", 2) not in history.names()
    assert len(history.to_bytes()) < 8_000_000


def test_the_file_gives_the_same_back_and_a_damaged_one_what_is_whole() -> None:
    history = History()
    for second in range(0, 5000, 2):
        history.add(second, {LOSS: second / 7, ("cpu", -1): 50.0})
    data = history.to_bytes()
    again = History.from_bytes(data)
    assert again.to_bytes() == data
    again.add(5000, {LOSS: 1.0})
    assert History.from_bytes(data[:-5]).names() == [LOSS]
    assert History.from_bytes(b"").names() == History.from_bytes(b"x" * 100_000).names() == []


async def test_a_history_outlives_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "EVERY_S", 0.0)
    monkeypatch.setattr(keeper, "SAVE_S", 0.0)
    path = tmp_path / "history.bin"
    kept = HistoryKeeper(path)
    task = asyncio.ensure_future(kept.keep(lambda: (100.0, {LOSS: 2.5})))
    while not path.exists():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    answer = await HistoryKeeper(path).answer({"kinds": ["loss"], "ids": [3], "level": 1, "count": 2})
    assert (answer.data["first"], answer.data["series"]) == (11, [["loss", 3]])
    assert unpack(answer.body, 2)[1][1] == 2.5
    for wrong in ({"level": 9, "count": 2}, {"level": 0, "count": 0}, {"level": 0, "count": 10**9}):
        with pytest.raises(Problem, match="no such span"):
            await kept.answer({"kinds": ["loss"], **wrong})
    assert not list(tmp_path.glob(".*"))


async def test_a_finished_job_answers_from_its_file(tmp_path: Path) -> None:
    files = Home(tmp_path).job("a")
    files.make()
    files.spec.write_text(json.dumps(JobSpec("a", "train.py", (NodeSpec("n1", "n1", "1"),)).to_json()))
    files.node.write_text('{"node": "n1"}')
    history = History()
    history.add(100, {LOSS: 2.5})
    files.history.write_bytes(history.to_bytes())
    answer: Any = await FileRequests(files).handle("series", {"kinds": ["loss"], "level": 0, "count": 1}, b"")
    assert list(unpack(answer.body, 1)[1]) == [2.5]
    assert read_answer("n1", "series", answer) == answer
    for body in (b"", answer.body + b"x", answer.body[:-1]):
        with pytest.raises(MalformedAnswer, match="the values of series do not match"):
            read_answer("n1", "series", Answer(answer.data, body))


def test_what_is_not_a_number_is_no_sample() -> None:
    progress: Any = {"loss": "nan", "lr": None, "rate": True, "steps_s": 0, "grad_norm": 1e300}
    assert dict(samples.of_rank(0, None, progress)) == {}
    assert dict(samples.of_rank(0, 7, {"steps_s": 4.0})) == {("step", 0): 7.0, ("step_s", 0): 0.25}
    assert dict(samples.of_node(None)) == {}


def merged(**nodes: History) -> Series:
    wanted = query(["loss", "cpu"], None, 20, 100)
    return merge(
        wanted, {name: one.spans(wanted.kinds, None, wanted.level, wanted.buckets) for name, one in nodes.items()}
    )


def test_the_series_of_all_nodes_begin_together_and_a_rank_that_moved_is_one() -> None:
    n1, n2 = History(), History()
    for second in range(0, 12, 2):
        n1.add(second, {LOSS: 1.0, ("cpu", -1): 10.0})
    for second in range(14, 22, 2):
        n2.add(second, {LOSS: 2.0, ("cpu", -1): 20.0})
    found = merged(n1=n1, n2=n2)
    assert (found.width_s, found.first, found.buckets, found.begin_s) == (2, 0, 11, 0.0)
    loss = ["" if math.isnan(value) else value for value in found.of("loss")[3]]
    assert loss == [1.0] * 6 + [""] + [2.0] * 4
    assert math.isnan(found.nodes["n1", "cpu", -1].mean[-1])
    assert found.nodes["n2", "cpu", -1].mean[-1] == 20.0
    assert (merged().ranks, merged().buckets) == ({}, 1)
    n2.add(1000, {("other", -1): 1.0})
    assert merged(n2=n2).buckets == 1, "there is a bucket even if nothing is known"


@pytest.mark.parametrize(("seconds", "width"), [(1, 2), (200, 2), (201, 8), (3200, 32), (10**9, 2048)])
def test_a_span_is_answered_as_finely_as_it_fits(seconds: int, width: int) -> None:
    assert WIDTHS_S[query(["loss"], None, seconds, 100).level] == width
    assert query(["loss"], None, seconds, 100).buckets <= 100
    assert query(["loss"], None, seconds, 1000).buckets <= BUCKETS, "a node answers no more"


def test_what_a_script_writes_for_us_replaces_what_its_output_shows(tmp_path: Path) -> None:
    reader, reports = StepReader(), Reports()
    reader.feed("stdout", b"step 5 loss 9\n", 1)
    reports.read(tmp_path, reader)
    assert (reader.step, reader.figures.values()["loss"]) == (5, 9.0)
    file = tmp_path / REPORTS
    own = {"step": 803, "total": 2000, "loss": 1.5, "lr": 3e-4, "rate": 41000, "unit": "tok/s"}
    file.write_text("junk\n" + json.dumps(own) + '\n{"grad_norm": 0.5}\n{"step": 9')
    reports.read(tmp_path, reader)
    reader.feed("stdout", b"step 6 loss 8\n", 2)
    assert (reader.step, reader.total) == (803, 2000)
    wanted = {"loss": 1.5, "lr": 3e-4, "grad_norm": 0.5, "rate": 41000.0, "unit": "tok/s", "steps_s": None}
    assert reader.figures.values() == wanted
    assert reader.figures.take_losses() == [(5, "9")]
    with file.open("a") as more:
        more.write('04, "loss": NaN, "rate": 1' + "0" * 400 + ', "total": true}\n')
    reports.read(tmp_path, reader)
    assert (reader.step, reader.total, reader.warning) == (904, 2000, "loss is nan, about step 904")
    assert {**reader.figures.values(), "steps_s": None} == {**wanted, "loss": "nan"}
    # Of a flood only the end is read, and a file that is cut begins anew.
    file.write_text("x" * REPORTS_LOOK_BACK * 2 + '\n{"step": 7}\n')
    reports.read(tmp_path, reader)
    assert reader.step == 7
    file.write_text('{"step": 8}\n')
    reports.read(tmp_path, reader)
    assert reader.step == 8


def test_more_series_than_are_kept_do_not_replace_each_other() -> None:
    """A node with hundreds of ranks would begin all of them again with every sample, and keep nothing."""
    history = History()
    for moment in range(1000, 1020, 2):
        history.add(moment, {("loss", number): 1.0 for number in range(2 * pyramid.MAX_SERIES)})
    assert history.names() == [("loss", number) for number in range(pyramid.MAX_SERIES)]
    spans = history.spans(["loss"], None, 0, 10)
    assert all(list(span.mean) == [1.0] * 10 for span in spans.values())

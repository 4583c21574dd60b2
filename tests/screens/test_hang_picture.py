"""The picture of a hang: who waits where, who is missing, and the lines of the script, at each width."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.tui.looks import Glyphs
from supervisor.tui.model import take
from supervisor.tui.rows.hang import hang_rows
from supervisor.tui.rows.spans import row_width, text_of
from tests.screens import recorded

SOURCE = {
    "first": 18,
    "text": "    def next_batch(self, step):\n        if step == 40:\n            self.ready.wait()\n\ndef main():",
}


def missing(waiting: list[int], absent: list[int], **more: Any) -> Any:
    return {"collective": "all_reduce", "seq": 81, "waiting": waiting, "missing": absent, "stacks": {}, **more}


def drawn(document: Any, nodes: int, per_node: int, width: int = 118, **options: Any) -> list[str]:
    group = take(recorded.many(nodes, per_node)).nodes
    rows = hang_rows(document, group, width, Glyphs(options.pop("ascii_only", False)), over=False)
    assert max(map(row_width, rows)) <= width
    return [text_of(row).rstrip() for row in rows]


def test_the_source_of_the_missing_rank_stands_beside_the_ranks_where_there_is_room() -> None:
    place = "train.py:20 in next_batch"
    document = missing([0, 1, 2], [3], stacks={"3": place}, sources={place: SOURCE})
    assert drawn(document, 2, 2) == [
        "  all_reduce 81: 3 ranks are waiting    rank 3 at train.py:20 in next_batch",
        "    n000 ■■  n001 ■?                      18  def next_batch(self, step):",
        "  ? rank 3 never reached it               19      if step == 40:",
        "                                        ▸ 20          self.ready.wait()",
    ]
    assert drawn(document, 2, 2, 78, ascii_only=True)[1:5] == [
        "    n000 ##  n001 #?",
        "  ? rank 3 never reached it",
        "  rank 3 at train.py:20 in next_batch",
        "    18  def next_batch(self, step):",
    ]


def test_ranks_in_different_collectives_have_a_strip_each() -> None:
    calls = [
        {"collective": "all_reduce", "seq": 81, "group": "0", "ranks": [0, 1, 2]},
        {"collective": "broadcast", "seq": None, "group": "5", "ranks": [3]},
    ]
    assert drawn(missing([0, 1, 2], [3], calls=calls, stacks={"3": "train.py:9 in load"}), 2, 2) == [
        "  all_reduce 81: 3 ranks are waiting",
        "    n000 ■■  n001 ■?",
        "  broadcast of group 5: 1 rank is waiting",
        "    n000 ··  n001 ·■",
        "    rank 3 at train.py:9 in load",
    ]


@pytest.mark.parametrize(
    ("absent", "shown"),
    [([300], ["    n037 ■■■■?■■■", "    ■ and 504 ranks of other nodes"]), ([], ["    ■ all 512 ranks"])],
)
def test_nodes_of_a_large_group_that_wait_alike_share_a_line(absent: list[int], shown: list[str]) -> None:
    waiting = [rank for rank in range(512) if rank not in absent]
    assert drawn(missing(waiting, absent), 64, 8)[1 : 1 + len(shown)] == shown


def test_a_group_that_is_over_shows_its_ranks_without_nodes() -> None:
    assert drawn(missing(list(range(9)), [9]), 1, 2)[1] == "    r0 ■■■■■■■■  r8 ■?"

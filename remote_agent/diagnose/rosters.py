"""Who is there and who is not, as a text lists it: a list of those who came says of all others that they did not.

In: the text of a rank, or of none. Out: its Roster; the ranks that are absent by it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from remote_agent.diagnose.last_words import is_progress
from remote_agent.diagnose.tracebacks import untagged_lines
from remote_agent.text.names import read_number
from remote_agent.text.shapes import KEPT_TEXTS

_NOUN = r"(?:ranks?|tasks?|process(?:es)?|workers?|members?)"
_SPAN = r"\d{1,6}(?: ?(?:-|\.\.) ?\d{1,6})?"
_LIST = rf"[\[({{]?(?P<list>{_SPAN}(?:(?:, ?(?:and )?| and | )(?:{_NOUN} )?{_SPAN})*)[\])}}]?(?![\d/%]|\.\d|:\d)"
# These are said of one rank after the other, those of a list as well.
_SPOKE = (
    r"arrived?|joined|entered|reached|registered|checked.in|wait(?:ing|s)?|(?:respond|answer)(?:ed)?|connected(?! to)"
)
_CAME = rf"{_SPOKE}|ready|present|here|alive|ack\w*|hello"
_AWAY = (
    r"missing|absent|unhealthy|unresponsive|silent|stalled|overdue|lagging|timed[ -]out"
    r"|stopped (?:sending|responding|answering)|not sent (?:a |any )?heartbeats?|missed (?:\w+ )?heartbeats?"
    r"|(?:made |makes )?no (?:heartbeat|answer|response|progress|sign of life)s?"
)
_STATE = rf"\b(?P<state>{_CAME}|{_AWAY})\b"
_FOR = r"(?:waiting|waits|waited)(?: \w+){0,2} (?:for|on)|no \w+(?: \w+)? (?:of|from|by)"
_IS = "is|are|was|were|has|have|still|been"
_NOT = r"(?P<not>\b(?:not|never|yet to) (?:yet )?(?:be )?)?"
_FORMS = tuple(
    re.compile(form, re.IGNORECASE)
    for form in (
        # "ready ranks: 0, 1", "ranks not arrived: 0-3", "entered 12: ranks 0 1 3", "all but rank 5 have come"
        rf"{_NOT}{_STATE} {_NOUN}(?: names?)?(?: are| is)?[ :=]{{1,3}}{_LIST}",
        rf"\b{_NOUN} (?:that )?(?:are |have )?(?:(?:still|yet|already) )?{_NOT}{_STATE}(?: so far)?[ :=]{{1,3}}{_LIST}",
        rf"{_NOT}{_STATE}[^\n:;,(=]{{0,40}}(?:: ?|= ?| (?=\())(?:{_NOUN} )?{_LIST}",
        rf"\ball (?:{_NOUN} )?(?P<not>but|except)(?: for)? (?:{_NOUN} )?{_LIST} (?:\w+ ){{0,2}}{_STATE}",
        # "waiting for rank 3", "no answer from rank 3"
        rf"\b(?P<state>{_FOR}) (?:the )?{_NOUN}[ :=]{{1,2}}{_LIST}",
        # "rank 0 (n1) has joined", "ack from rank 0", "rank 4 is missing"
        rf"\b{_NOUN}[ #]?{_LIST}:?(?: \([^()]*\))? (?P<one>(?:[\w']+ ){{0,3}})\b(?P<state>{_SPOKE})\b",
        rf"\b(?P<one>)(?P<state>ack\w*|hello) from {_NOUN} {_LIST}",
        # Lightning's and torch's words for it
        rf"\b(?P<one>)(?P<state>GLOBAL_RANK): {_LIST}(?=, MEMBER)",
        rf"\b(?P<one>)(?P<state>waiting)\b.* for rank: {_LIST}(?=, key)",
        rf"\b{_NOUN}[ #]?{_LIST}(?: \([^()]*\))? (?P<one>(?:(?:{_IS}) ){{0,3}})\b(?P<state>{_AWAY})\b",
    )
)
_NEGATED = re.compile(r"\b(?:not|never|no)\b|n't\b")
_HOT = re.compile(rf"\b(?:{_CAME}|{_AWAY}|{_FOR}|GLOBAL_RANK)\b", re.IGNORECASE)
# The list is below such a line, a member in each of its own.
_HEADING = re.compile(rf"{_STATE}[^\n]{{0,60}}:\s*$", re.IGNORECASE)
_ITEM = re.compile(r"^(?:\[\d+\] )?[\s>*-]*(?:[Rr]ank |[Tt]ask |\S*/task:)?(?P<list>\d{1,6})(?=:? ?\[|:? *$|: )")
_ITEMS = 1000
_COUNT = re.compile(
    r"(?<![\d.:/])(?P<came>\d{1,6}) ?(?:/|(?:out )?of(?: the)?) ?(?P<of>\d{1,6})(?![\d:/%]|\.\d| ?[kKMGT]i?B\b)"
)
_TOTALS = re.compile(
    r"\b(?<!local )(?<!batch )size (\d{1,6})\b|(?<![\d.,/-])(\d{1,6})(?: \w+)? (?:ranks|tasks|processes|workers|members"
    r"|cards|clients)\b|\b[Ww]orld[ _]?size\W{1,3}(\d{1,6})\b|\bworld_size=(\d{1,6})|MEMBER: \d+/(\d{1,6})"
)
# The words of a text that waits for the others: a list alone may also be of those who are all there.
WAITS = re.compile(
    r"wait|stall|tim(?:ed?|es|ing)[ -]?out|\bh(?:ang|ung)|missing|absent|heartbeat|unhealthy|\bnot \w+ed\b|giving up"
    r"|dead ?lock|DEADLINE|no progress",
    re.IGNORECASE,
)
_OF_RANKS = re.compile(rf"\b{_NOUN}\b|/task:|_RANK\b|\bbarrier\b|\bclients\b|\backs?\b", re.IGNORECASE)
# Lists further above the last one are of earlier meetings.
_LAST_LISTS = 50


class Roster(NamedTuple):
    """The last list of who came, or of who did not, in a text."""

    line: int
    """The number of its line, counted from 0."""
    ranks: frozenset[int]
    came: bool
    """Whether it is of those who came."""
    of: int
    """How many there should be; 0: the text does not tell."""
    is_whole: bool
    """False where the lists differ, or where the text counts more than they name."""
    is_list: bool
    """False where each process speaks of itself: then no line says who should have come."""
    is_of_one: bool
    """True where somebody only says for whom he waits."""
    twice: frozenset[int] = frozenset()
    """Those that said more than once that they are there."""


class _Said(NamedTuple):
    """What one line says of some ranks."""

    line: int
    state: str
    came: bool
    ranks: frozenset[int]
    is_list: bool


def absent_of(roster: Roster, world: int) -> frozenset[int]:
    """Return who is absent by a roster of a world of this size (0: unknown); nobody where it does not tell all."""
    of = world or roster.of
    everyone = frozenset(range(of))
    if not roster.is_whole or (of and not roster.ranks <= everyone):
        return frozenset()
    absent = everyone - roster.ranks if roster.came else roster.ranks
    # Where nobody made a list, those who are silent must be fewer than those who spoke.
    return absent if roster.is_list or len(absent) < len(roster.ranks) else frozenset()


@functools.lru_cache(KEPT_TEXTS)
def read_roster(text: str) -> Roster | None:
    """Return the last roster of a text, unless training went on below it; None: there is none."""
    lines = untagged_lines(text)
    said: list[_Said] = []
    for number in range(len(lines) - 1, -1, -1):
        own = list(_statements(lines, number))
        said += reversed(own)
        # What was said before the last step is of an earlier meeting.
        if not own and is_progress(lines[number]):
            break
    if not said:
        return None
    said.reverse()
    near = {each.line for each in said}.union(range(max(0, said[-1].line - 2), len(lines)))
    of_ranks = (lines[number] for number in sorted(near) if _OF_RANKS.search(lines[number]))
    counts = [each for line in of_ranks for each in _COUNT.finditer(line)]
    totals = {read_number(next(filter(None, each.groups()))) for line in lines for each in _TOTALS.finditer(line)}
    highest = max(rank for each in said for rank in each.ranks)
    likely = {total for total in totals.union(read_number(each["of"]) for each in counts) if total > highest}
    of = likely.pop() if len(likely) == 1 else 0
    return _fold(said, of, [read_number(each["came"]) for each in counts])


def _fold(said: Sequence[_Said], of: int, counts: Sequence[int]) -> Roster:
    """Return what the statements say together: the last list counts, if those before it are in a chain with it."""
    everyone = frozenset(range(of))
    lists = [each for each in said if each.is_list and each.ranks != everyone]
    if not lists:
        return _of_singles([each for each in said if not each.is_list] or said, everyone)
    last = lists[-1]
    whole = max(
        (each.line for each in said if each.is_list and each.ranks == everyone and each.line < last.line), default=-1
    )
    alike = [each for each in lists if each.came == last.came and each.line > whole][-_LAST_LISTS:]
    is_chain = all(one.ranks <= other.ranks or other.ranks <= one.ranks for one in alike for other in alike)
    ranks = frozenset().union(*(each.ranks for each in alike if each.line == last.line))
    is_counted = not counts or not of or counts[-1] == (len(ranks) if last.came else of - len(ranks))
    is_of_one = re.fullmatch(_FOR, last.state) is not None
    return Roster(last.line, ranks, last.came, of, is_chain and is_counted, is_list=True, is_of_one=is_of_one)


def _of_singles(said: Sequence[_Said], everyone: frozenset[int]) -> Roster:
    """Return the roster of statements about one rank each, since all of them had come the last time."""
    last, came, often = said[-1], set[int](), set[int]()
    for each in said:
        if each.state == last.state and each.came == last.came:
            came = set() if came == everyone else came
            often |= came & each.ranks
            came |= each.ranks
    twice = frozenset(often) if last.state == "global_rank" else frozenset[int]()
    is_list = not last.came
    return Roster(last.line, frozenset(came), last.came, len(everyone), True, is_list, is_of_one=False, twice=twice)


def _statements(lines: Sequence[str], number: int) -> Iterator[_Said]:
    """Yield what a line says of who came."""
    line = lines[number]
    if _OF_RANKS.search(line) is None or _HOT.search(line) is None:
        return
    heading = _HEADING.search(line)
    items = itertools.takewhile(bool, map(_ITEM.match, lines[number + 1 : number + _ITEMS] if heading else ()))
    below = frozenset(read_number(item["list"]) for item in items if item is not None)
    if heading is not None and below:
        yield _Said(number, heading["state"], _has_come(heading), below, is_list=True)
        return
    for match in (match for form in _FORMS for match in form.finditer(line)):
        is_list = "one" not in match.groupdict() or len(_ranks(match["list"])) > 1
        yield _Said(number, match["state"].lower(), _has_come(match), _ranks(match["list"]), is_list)


def _has_come(match: re.Match[str]) -> bool:
    groups = match.groupdict()
    is_not = bool(groups.get("not")) or _NEGATED.search(groups.get("one") or "") is not None
    return (re.fullmatch(rf"{_CAME}|global_rank", match["state"].lower()) is not None) is not is_not


def _ranks(text: str) -> frozenset[int]:
    """Return the numbers of a list such as 0-3,5 7."""
    ranks: set[int] = set()
    for first, last in re.findall(r"(\d+)(?: ?(?:-|\.\.) ?(\d+))?", text):
        ranks.update(range(read_number(first), min(read_number(last or first), read_number(first) + 100_000) + 1))
    return frozenset(ranks)

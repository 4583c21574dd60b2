"""What NCCL told as lines: what is odd, who talks how, what is used, node by node, warnings, environment.

In: a Fabric, a width. Out: lines, and the node that each one is about.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from supervisor import overrides, plain
from supervisor.inventory.pattern import fold
from supervisor.plain_nccl import absent, network
from supervisor.tui import words
from supervisor.tui.cells import Row, Span, clean, fit
from supervisor.tui.incident_rows import Line, Page
from supervisor.tui.textflow import wrap

if TYPE_CHECKING:
    from supervisor.session.fabric import Fabric
    from supervisor.tui.source import Json
    from supervisor.tui.words import Glyphs

WIDE: Final = 100
# The columns of the table of nodes: fact, name, least width, widest.
COLUMNS: Final = (
    ("version", "version", 8, 17),
    ("network", "network", 7, 14),
    ("interface", "interface", 9, 12),
    ("gdr", "GDR", 3, 7),
    ("nvls", "NVLS", 4, 4),
    ("channels", "chan", 4, 4),
    ("devices", "devices", 12, 40),
)
# Nodes that have the same of these are shown as one where there is no room for each.
ALIKE: Final = ("version", "network", "gdr", "nvls")
_ODD: Final = {"error": ("X", "bad"), "warning": ("!", "warn"), "info": ("-", "dim")}


class Group(NamedTuple):
    """Nodes that told the same: one row and one column of the matrix."""

    name: str
    nodes: tuple[str, ...]


class NcclPage(Page):
    """The page, and which node a line is about."""

    def __init__(self, fabric: Fabric, width: int, glyphs: Glyphs) -> None:
        super().__init__(width, glyphs)
        self.fabric = fabric
        self.nodes: dict[tuple[str, int], str] = {}
        """By line: the node to go to."""
        self.more: dict[tuple[str, int], list[str]] = {}
        """By line: its text in full, and what to do."""

    def about(self, row: Row, nodes: tuple[str, ...], *more: str) -> None:
        """Add a line about nodes; `more`: all that it says, for whom selects it."""
        self.add(row)
        if nodes:
            self.nodes[self.lines[-1].key] = nodes[0]
        if more:
            self.more[self.lines[-1].key] = [text for text in more if text]


def nccl_page(fabric: Fabric, width: int, glyphs: Glyphs) -> NcclPage:
    """The page of what was told."""
    page = NcclPage(fabric, width, glyphs)
    _odd(page)
    _matrix(page)
    _used(page)
    _nodes(page)
    _warnings(page)
    _environment(page)
    return page


def nothing_told(generation: int, status: Json, width: int) -> list[Row]:
    """What to do where NCCL told nothing."""
    text = (
        f"NCCL has told nothing in generation {max(0, generation)}: its log is off, no rank has got that far yet, "
        "or the job talks by gloo alone."
    )
    rows: list[Row] = [((" " + line, "text"),) for line in wrap(text, width - 2)]
    ask = (("  x n ", "key"), ("sets NCCL_DEBUG=INFO for the next group, now or later", "dim"))
    line = "supervisor restart HOSTS --env NCCL_DEBUG=INFO does the same"
    cli: list[Row] = [((" " * 6 + part, "dim"),) for part in wrap(line, width - 7)]
    asked = overrides.now(status)
    return [*rows, *([(), ((f"  {clean(asked)}", "warn"),)] if asked else []), (), ask, *cli]


def short(transport: str) -> str:
    """A transport in few cells: `IB+GDR` for `NET/IB/GDRDMA`."""
    name = transport.removeprefix("NET/").replace("/GDRDMA", "+GDR")
    return "SHM" if name.startswith("SHM") else name


def _used(page: NcclPage) -> None:
    fabric = page.fabric
    page.section("in use", f"told by {words.count(len(fabric.nodes), 'node')}")
    facts = [
        ("version", fabric.all_of("version")),
        ("network", network(fabric)),
        ("inside nodes", ", ".join(kind for kind, _ in fabric.inside().most_common())),
        ("between nodes", ", ".join(kind for kind, _ in fabric.between().most_common())),
        ("GPUDirect RDMA", fabric.all_of("gdr")),
        ("NVLS", fabric.all_of("nvls")),
        ("channels", fabric.all_of("channels")),
        ("rings", fabric.all_of("rings")),
        ("trees", fabric.all_of("trees")),
        ("GID index", fabric.all_of("gid")),
        ("collnet", fabric.all_of("collnet")),
        ("tuner", fabric.all_of("tuner")),
    ]
    line: list[Span] = [("  ", "")]
    used = 2
    for name, value in facts:
        text = clean(value)
        size = len(name) + len(text) + 4
        if not text:
            continue
        if used > 2 and used + size > page.width:
            page.add(tuple(line))
            line, used = [("  ", "")], 2
        line += [(f"{name} ", "dim"), (f"{text}   ", "text")]
        used += size
    page.add(tuple(line))
    missing = absent(fabric)
    if missing:
        page.about((("  not in it: ", "dim"), (missing, "warn")), (), f"not in it: {missing}")


def _odd(page: NcclPage) -> None:
    odd = page.fabric.odd
    page.section(f"what is odd ({len(odd)})" if odd else "what is odd")
    if not odd:
        page.add((("  nothing: what the nodes told agrees", "ok"),))
    for one in odd:
        mark, role = _ODD[one.severity]
        where = "" if any(node in one.text for node in one.nodes) else f"{fold(one.nodes)}: "
        text = where + one.text
        loud = "text" if role == "dim" else role
        page.about(((f"  {mark} ", role), (clean(text), loud)), one.nodes, text, one.hint)


# --- the matrix


def _matrix(page: NcclPage) -> None:
    fabric = page.fabric
    if not fabric.pairs:
        return
    cell = 14 if page.width >= WIDE else 9
    room = (page.width - 2) // (cell + 1) - 2
    groups = groups_of(fabric, room)
    grouped = any(len(group.nodes) > 1 for group in groups)
    legend = "-: nothing told   GDR: GPUDirect RDMA"
    page.section("who talks how" + (", alike nodes as one" if grouped else ""), legend if page.width >= 72 else "")
    usual = _main(fabric.between())
    label = page.width - 3 - (cell + 1) * (len(groups) + 1)
    label = max(8, min(label, 2 + max(len(group.name) for group in groups), 28))
    heads = ["inside", *(group.name for group in groups)]
    more = page.glyphs.more
    page.add(((" " * (label + 3), ""), *((fit(name, cell, more) + " ", "head") for name in heads)))
    for row in groups:
        spans: list[Span] = [("  " + fit(row.name, label, more) + " ", "tag")]
        spans.append(_cell(_inside(fabric, row), cell, "", more))
        for column in groups:
            kinds = _across(fabric, row, column)
            same = row is column and len(row.nodes) == 1
            spans.append((fit("", cell) + " ", "") if same else _cell(kinds, cell, usual, more))
        page.about(tuple(spans), row.nodes)


def _cell(kinds: Counter[str], width: int, usual: str, more: str) -> Span:
    """The transports of one field; loud where they are not what most nodes use."""
    if not kinds:
        return (fit("-", width) + " ", "off")
    names = list(dict.fromkeys(short(kind) for kind, _ in kinds.most_common()))
    plain = not usual or (len(names) == 1 and names[0] == usual)
    return (fit(",".join(names), width, more) + " ", "text" if plain else "warn")


def _main(kinds: Counter[str]) -> str:
    return short(kinds.most_common(1)[0][0]) if kinds else ""


def _inside(fabric: Fabric, group: Group) -> Counter[str]:
    return sum((fabric.pairs.get((node, node), Counter()) for node in group.nodes), Counter())


def _across(fabric: Fabric, one: Group, other: Group) -> Counter[str]:
    left, right = set(one.nodes), set(other.nodes)
    found = Counter[str]()
    for (first, second), kinds in fabric.pairs.items():
        if first != second and ((first in left and second in right) or (first in right and second in left)):
            found.update(kinds)
    return found


def groups_of(fabric: Fabric, room: int) -> list[Group]:
    """The nodes, each as its own group where there is room; else those that told alike, the fewest first."""
    if len(fabric.nodes) <= room:
        return [Group(node, (node,)) for node in fabric.nodes]
    alike: dict[object, list[str]] = {}
    for node, facts in fabric.nodes.items():
        inside = frozenset(short(kind) for kind in fabric.pairs.get((node, node), ()))
        alike.setdefault((inside, *(facts.get(name) for name in ALIKE)), []).append(node)
    found = sorted(alike.values(), key=len)
    if len(found) > room:
        found = [*found[: room - 1], [node for nodes in found[room - 1 :] for node in nodes]]
    return [Group(fold(nodes), tuple(nodes)) for nodes in found]


# --- the rest


def _nodes(page: NcclPage) -> None:
    fabric = page.fabric
    name = max(6, min(20, max(len(clean(node)) for node in fabric.nodes)))
    numbers = {node: plain.ranges(ranks) for node, ranks in fabric.ranks.items()}
    ranks = max(5, min(9, max(len(text) for text in numbers.values())))
    left = page.width - 5 - name - ranks
    columns = []
    for fact, title, least, most in COLUMNS:
        needed = max((len(clean(facts.get(fact, ""))) for facts in fabric.nodes.values()), default=0)
        size = max(least, len(title), min(most, needed))
        if needed and size + 2 <= left:
            columns.append((fact, title, size))
            left -= size + 2
    page.section("nodes", "enter: the log of the node")
    more = page.glyphs.more
    head = (
        "  "
        + fit("node", name)
        + "  "
        + fit("ranks", ranks)
        + "  "
        + "  ".join(fit(title, size) for _, title, size in columns)
    )
    page.add(((head, "head"),))
    loud = {node for odd in fabric.odd if odd.severity != "info" for node in odd.nodes}
    for node in sorted(fabric.nodes, key=lambda node: node not in loud):
        spans: list[Span] = [("  " + fit(node, name, more), "tag")]
        spans.append(("  " + fit(numbers[node], ranks, more), "text"))
        for fact, _, size in columns:
            value = fabric.nodes[node].get(fact, "-")
            differs = value not in ("-", fabric.common(fact)) and fact != "devices"
            spans.append(("  " + fit(value, size, more), "warn" if differs else "text"))
        page.about(tuple(spans), (node,))


def _warnings(page: NcclPage) -> None:
    warned = page.fabric.warned
    if not warned:
        return
    page.section(f"warnings ({len(warned)})")
    for one in warned:
        nodes = tuple(dict.fromkeys(one.ranks.values()))
        who = f"rank {plain.ranges(list(one.ranks))} on {fold(nodes)}"
        said: Row = (("  ! ", "warn"), (f"{one.meaning}: " if one.meaning else "", "text"), (clean(one.text), "warn"))
        page.about(said, nodes, one.text, one.meaning, who)


def _environment(page: NcclPage) -> None:
    env = page.fabric.env
    if not env:
        return
    page.section("environment that NCCL read")
    everybody = len(page.fabric.nodes)
    for name, values in env.items():
        for value, nodes in values.items():
            where = "" if len(nodes) == everybody else f"  on {fold(nodes)}"
            page.about(((f"  {clean(name)} ", "dim"), (clean(value), "text"), (where, "warn")), nodes)


def lines_of(rows: list[Row]) -> list[Line]:
    """Rows as lines of a page."""
    return [Line(("", number), row) for number, row in enumerate(rows)]

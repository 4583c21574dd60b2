"""The transports that NCCL uses between nodes, differences between nodes, and problems.

In: the answers of the nodes while the screen is visible. Out: the log of a node.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from textual import on

from remote_agent.text.names import count, name_ranks, ranges
from supervisor.errors import SupervisorError
from supervisor.inventory.pattern import fold
from supervisor.nccl import JOB_FACTS
from supervisor.tui.rows.incident import PageBuilder, PageLine
from supervisor.tui.rows.spans import Row, Span, clean, fit, wrap
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import LogOf, Target
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import DetailPane
from supervisor.wording.status import absent, environment, network
from supervisor.wording.status import kinds as kinds_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.widget import Widget

    from remote_agent.wire.documents import Status
    from supervisor.nccl import Fabric
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView

WIDE: Final = 100
# The table of nodes has these columns: fact, name, least width, greatest width.
COLUMNS: Final = (
    ("version", "version", 8, 17),
    ("network", "network", 7, 14),
    ("interface", "interface", 9, 12),
    ("gdr", "GDR", 3, 7),
    ("nvls", "NVLS", 4, 4),
    ("channels", "chan", 4, 4),
    ("devices", "devices", 12, 40),
)
# Nodes with equal values of these facts are shown as one if there is no room for each.
ALIKE: Final = ("version", "network", "gdr", "nvls")
_ODD: Final = {"error": ("X", "bad"), "warning": ("!", "warn"), "info": ("-", "dim")}


class NodeGroup(NamedTuple):
    """Nodes with equal output: one row and one column of the matrix."""

    name: str
    nodes: tuple[str, ...]


class NcclPage(PageBuilder):
    """The page, and which node a line is about."""

    def __init__(self, fabric: Fabric, width: int, glyphs: Glyphs) -> None:
        super().__init__(width, glyphs)
        self.fabric = fabric
        self.nodes: dict[tuple[str, int], str] = {}
        """By line: the node to go to."""
        self.more: dict[tuple[str, int], list[str]] = {}
        """The full text of a line, and the advice for it."""

    def about(self, row: Row, nodes: tuple[str, ...], *more: str) -> None:
        """Add a line about nodes; `more`: its full text, shown when the line is selected."""
        self.add(row)
        if nodes:
            self.nodes[self.lines[-1].key] = nodes[0]
        if more:
            self.more[self.lines[-1].key] = [text for text in more if text]


def nccl_page(fabric: Fabric, width: int, glyphs: Glyphs) -> NcclPage:
    """Return the page of NCCL's output."""
    page = NcclPage(fabric, width, glyphs)
    _odd(page)
    _matrix(page)
    _used(page)
    _nodes(page)
    _warnings(page)
    _environment(page)
    return page


def no_output(generation: int, status: Status, width: int) -> list[Row]:
    """Return what to do if there is no output of NCCL."""
    text = (
        f"no NCCL output yet in generation {max(0, generation)}: its log is off, no rank has initialized it yet, "
        "or the job uses gloo only."
    )
    rows: list[Row] = [((" " + line, "text"),) for line in wrap(text, width - 2)]
    ask = (("  x n ", "key"), ("set NCCL_DEBUG=INFO for the next group, now or later", "dim"))
    line = "supervisor restart HOSTS --env NCCL_DEBUG=INFO does the same"
    cli: list[Row] = [((" " * 6 + part, "dim"),) for part in wrap(line, width - 7)]
    asked = environment(status)
    return [*rows, *([(), ((f"  {clean(asked)}", "warn"),)] if asked else []), (), ask, *cli]


def short(transport: str) -> str:
    """Return a transport in few cells: `IB+GDR` for `NET/IB/GDRDMA`."""
    name = transport.removeprefix("NET/").replace("/GDRDMA", "+GDR")
    return "SHM" if name.startswith("SHM") else name


def _used(page: NcclPage) -> None:
    fabric = page.fabric
    page.section("in use", f"reported by {count(len(fabric.nodes), 'node')}")
    facts: list[tuple[str, str]] = []
    for fact, label in JOB_FACTS.items():
        facts.append((label, network(fabric) if fact == "network" else fabric.all_of(fact)))
        if fact == "network":
            facts += [("inside nodes", kinds_text(fabric.inside())), ("between nodes", kinds_text(fabric.between()))]
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
        page.about((("  not available: ", "dim"), (missing, "warn")), (), f"not available: {missing}")


def _odd(page: NcclPage) -> None:
    odd = page.fabric.odd
    page.section(f"problems ({len(odd)})" if odd else "problems")
    if not odd:
        page.add((("  none: all nodes report the same", "ok"),))
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
    legend = "-: no output   GDR: GPUDirect RDMA"
    page.section("transports" + (", equal nodes as one" if grouped else ""), legend if page.width >= 72 else "")
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
    """Return the transports of one field; loud where they are not what most nodes use."""
    if not kinds:
        return (fit("-", width) + " ", "off")
    names = list(dict.fromkeys(short(kind) for kind, _ in kinds.most_common()))
    documents = not usual or (len(names) == 1 and names[0] == usual)
    return (fit(",".join(names), width, more) + " ", "text" if documents else "warn")


def _main(kinds: Counter[str]) -> str:
    return short(kinds.most_common(1)[0][0]) if kinds else ""


def _inside(fabric: Fabric, group: NodeGroup) -> Counter[str]:
    return sum((fabric.pairs.get((node, node), Counter()) for node in group.nodes), Counter())


def _across(fabric: Fabric, one: NodeGroup, other: NodeGroup) -> Counter[str]:
    left, right = set(one.nodes), set(other.nodes)
    transports = Counter[str]()
    for (first, second), kinds in fabric.pairs.items():
        if first != second and ((first in left and second in right) or (first in right and second in left)):
            transports.update(kinds)
    return transports


def groups_of(fabric: Fabric, room: int) -> list[NodeGroup]:
    """Return each node as a group if there is room; otherwise nodes with equal output, the smallest groups first."""
    if len(fabric.nodes) <= room:
        return [NodeGroup(node, (node,)) for node in fabric.nodes]
    alike: dict[object, list[str]] = {}
    for node, facts in fabric.nodes.items():
        inside = frozenset(short(kind) for kind in fabric.pairs.get((node, node), ()))
        alike.setdefault((inside, *(facts.get(name) for name in ALIKE)), []).append(node)
    groups = sorted(alike.values(), key=len)
    if len(groups) > room:
        groups = [*groups[: room - 1], [node for nodes in groups[room - 1 :] for node in nodes]]
    return [NodeGroup(fold(nodes), tuple(nodes)) for nodes in groups]


# --- the rest


def _nodes(page: NcclPage) -> None:
    fabric = page.fabric
    name = max(6, min(20, max(len(clean(node)) for node in fabric.nodes)))
    numbers = {node: ranges(ranks) for node, ranks in fabric.ranks.items()}
    ranks = max(5, min(9, max(len(text) for text in numbers.values())))
    left = page.width - 5 - name - ranks
    columns = []
    for fact, title, least, most in COLUMNS:
        needed = max((len(clean(facts.get(fact, ""))) for facts in fabric.nodes.values()), default=0)
        size = max(least, len(title), min(most, needed))
        if needed and size + 2 <= left:
            columns.append((fact, title, size))
            left -= size + 2
    page.section("nodes", "enter: open the log of the node")
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
        who = f"{name_ranks(list(one.ranks))} on {fold(nodes)}"
        row: Row = (("  ! ", "warn"), (f"{one.meaning}: " if one.meaning else "", "text"), (clean(one.text), "warn"))
        page.about(row, nodes, one.text, one.meaning, who)


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


def lines_of(rows: list[Row]) -> list[PageLine]:
    """Return rows as lines of a page."""
    return [PageLine(("", number), row) for number, row in enumerate(rows)]


# NCCL reports when a group starts; ranks may take minutes to get there.
EVERY_S: Final = 5.0


class NcclScreen(LiveScreen):
    """The output of NCCL on all nodes."""

    NAME = "nccl"

    def body(self) -> Iterable[Widget]:
        """Yield one page, and the details of the selected line."""
        yield Picker(title="nccl", id="nccl")
        yield DetailPane("detail")

    def on_mount(self) -> None:
        """Begin with nothing."""
        self._fabric: Fabric | None = None
        self._lines: list[PageLine] = []
        self._about: dict[tuple[str, int], str] = {}
        self._more: dict[tuple[str, int], list[str]] = {}
        self._drawn: tuple[object, ...] = ()
        self._asked_at = 0.0
        self.query_one(DetailPane).display = False
        self.query_one(Picker).placeholder = ((" asking the nodes", "dim"),)

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Ask the nodes again every few seconds while the screen is visible."""
        super().tick(job_view, age_s, changed)
        if job_view.state and time.monotonic() - self._asked_at > EVERY_S:
            self._asked_at = time.monotonic()
            self.run_worker(self._ask, group="nccl", exclusive=True, exit_on_error=False)  # type: ignore[arg-type]

    async def _ask(self) -> None:
        try:
            self._fabric = await self.shell.source.nccl()
        except SupervisorError as error:
            self.shell.say(error.message, title="nccl", level="warning")
        self.shell.look_again()

    def show(self, job_view: JobView) -> None:
        """Show the newest answer."""
        picker, fabric = self.query_one(Picker), self._fabric
        width = picker.line_width or self.size.width - 1
        drawn = (fabric, width, job_view.generation, job_view.world_size, self.shell.source.status.get("environment"))
        if fabric is None or self._drawn == drawn:
            return
        self._drawn = drawn
        first = not self._more
        if fabric.nodes:
            page = nccl_page(fabric, width, self.shell.glyphs)
            self._lines, self._about, self._more = page.lines, page.nodes, page.more
        else:
            self._lines, self._about = (
                lines_of(no_output(job_view.generation or 0, self.shell.source.status, width)),
                {},
            )
            self._more = {}
        ranks = sum(len(numbers) for numbers in fabric.ranks.values())
        picker.heading = f"nccl, generation {max(0, fabric.generation)}"
        picker.note = ((f"{ranks} of {job_view.world_size or '?'} ranks reported", "dim"),)
        lines = self._lines
        picker.show([line.key for line in lines], lambda index: lines[index].row)
        if first and self._more:
            picker.select(next(iter(self._more)))
            picker.scroll_to_line(0)
        self._show_more()

    def _show_more(self) -> None:
        """Show the selected line in full."""
        detail, selected = self.query_one(DetailPane), self.query_one(Picker).selected
        texts = self._more.get(selected, []) if isinstance(selected, tuple) else []
        rows: list[Row] = []
        for number, text in enumerate(texts):
            rows += [((f"  {line}", "dim" if number else "text"),) for line in wrap(text, self.size.width - 4)]
        detail.display = bool(rows)
        detail.styles.height = min(len(rows) + 1, max(3, (self.size.height - 4) // 3))
        detail.show_rows("details, and what to do", rows)

    @on(Picker.Moved)
    def _moved(self) -> None:
        self.query_one(DetailPane).top = 0
        self._show_more()

    def selection(self) -> Target:
        """Return the node that the selected line is about."""
        selected = self.query_one(Picker).selected
        return Target(self._about.get(selected) if isinstance(selected, tuple) else None)

    @on(Picker.Opened)
    def open_node(self) -> None:
        """Open the NCCL log of the node."""
        target = self.selection()
        if target.node is not None:
            self.shell.open_log(LogOf(target, streams=("nccl",)))

    def action_logs(self) -> None:
        """Open the NCCL log of the node of the selected line, or of all nodes."""
        self.shell.open_log(LogOf(self.selection(), streams=("nccl",)))

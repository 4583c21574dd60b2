"""The launch: one line for each host, with reason and hint in full where it failed.

In: the progress of the hosts. Out: rows; the screen stays if too few hosts are up.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from remote_agent.text.names import count
from supervisor.tui.rows.spans import Row, Span, clean, fit, wrap
from supervisor.tui.rows.tables import name_width
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import Target
from supervisor.tui.widgets.picker import Picker
from supervisor.wording import values

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.widget import Widget

    from supervisor.link.view import HostView
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView, NodeRow

_LOOKS = {
    "up": ("✓", "+", "ok"),
    "connecting": ("~", "~", "start"),
    "lost": ("!", "!", "warn"),
    "failed": ("X", "X", "bad"),
}
# The stages of a launch, and the steps that belong to each.
STAGES: Final = (
    ("connect", ("resolve", "connect", "auth", "python", "push", "jobs", "open")),
    ("sync", ("sync",)),
    ("agent", ("start", "agent", "assign")),
    ("torch", ("build", "image", "engine")),
)
STAGE_WIDTH: Final = 15
# Below this many columns only the present step has room.
STAGES_FROM: Final = 110


class LaunchScreen(LiveScreen):
    """Progress per host."""

    NAME = "launch"

    def body(self) -> Iterable[Widget]:
        """Yield one list."""
        yield Picker(title="bringing up the hosts", id="hosts")

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Let the seconds of the steps pass."""
        super().tick(job_view, age_s, changed)
        if not changed and job_view.bringing_up:
            self.show(job_view)

    def show(self, job_view: JobView) -> None:
        """Show how far each host is."""
        picker = self.query_one(Picker)
        lines = launch_rows(job_view, picker.line_width or self.size.width - 1, self.shell.glyphs, time.monotonic())
        up = sum(is_up(node, job_view) for node in job_view.nodes)
        failed = sum(node.host.state == "failed" for node in job_view.nodes)
        picker.heading = "bringing up the hosts" if job_view.bringing_up else "connecting to the hosts"
        note: list[Span] = [(f"{up} of {count(len(job_view.nodes), 'host')} up", "ok" if up else "dim")]
        if failed:
            note.append((f"  {failed} failed", "bad"))
        picker.note = tuple(note)
        picker.placeholder = ((" reading the inventory", "dim"),)
        picker.show([key for key, _ in lines], lambda index: lines[index][1])

    def selection(self) -> Target:
        """Return the selected host."""
        key = self.query_one(Picker).selected
        return Target(key[0] if isinstance(key, tuple) and key[0] else None)


def is_up(node: NodeRow, job_view: JobView) -> bool:
    """Return whether a host is connected; in a launch, whether its torch is found too."""
    return node.host.state == "up" and (not job_view.bringing_up or node.host.step == "ready")


def launch_rows(job_view: JobView, width: int, glyphs: Glyphs, now_s: float) -> list[tuple[tuple[str, int], Row]]:
    """Return keys and rows: a line per host, and below a failed one why and what to do; now_s: time.monotonic()."""
    lines: list[tuple[tuple[str, int], Row]] = []
    room = name_width(job_view.nodes)
    for node in job_view.nodes:
        for number, row in enumerate(_host(node.host, room, width, glyphs, now_s if job_view.bringing_up else None)):
            lines.append(((node.name, number), row))
    if job_view.problem:
        details = [(line, "bad") for line in wrap(job_view.problem, width - 2)]
        details += [(line, "text") for line in wrap(job_view.hint, width - 2)] if job_view.hint else []
        lines.append((("", 0), ()))
        for number, (line, role) in enumerate(details, 1):
            lines.append((("", number), ((f" {line}", role),)))
    return lines


def stage_of(step: str) -> int:
    """Return which stage a step belongs to; their number for a host that is ready."""
    return next((at for at, (_, steps) in enumerate(STAGES) if step in steps), len(STAGES) if step == "ready" else 0)


def stages(host: HostView, glyphs: Glyphs, now_s: float) -> Row:
    """Return the stages of a launch on one host: which are done and what they took, which runs and since when."""
    here = stage_of(host.step)
    begins = [min((host.began[step] for step in steps if step in host.began), default=None) for _, steps in STAGES]
    begins.append(host.began.get("ready"))
    spans: list[Span] = []
    for at, (name, _) in enumerate(STAGES):
        begin = begins[at]
        end = next((time_s for time_s in begins[at + 1 :] if time_s is not None), None) if at < here else now_s
        took = "" if begin is None or end is None else f" {values.age(end - begin)}"
        if at < here:
            text, role = f"{glyphs.done} {name}{took}", "ok"
        elif at > here:
            text, role = f"{glyphs.dot} {name}", "off"
        else:
            text, role = f"{_spinner(host, glyphs, now_s)} {name}{took}", "start"
        spans += [(fit(text, STAGE_WIDTH, glyphs.more), role), (" ", "")]
    return tuple(spans)


def _spinner(host: HostView, glyphs: Glyphs, now_s: float) -> str:
    # If nothing changes, nothing spins.
    return glyphs.spinner[int(now_s * 8) % len(glyphs.spinner)] if host.step in host.began else "~"


def _host(host: HostView, room: int, width: int, glyphs: Glyphs, now_s: float | None) -> list[Row]:
    """Return one host; now_s: it is being brought up, and not ready before its last stage is done."""
    mark, ascii_mark, role = _LOOKS.get(host.state, ("-", "-", "off"))
    mark = ascii_mark if glyphs.ascii else mark
    if now_s is not None and host.state == "up" and host.step != "ready":
        mark, role = "~", "start"
    if now_s is not None and role == "start":
        mark = _spinner(host, glyphs, now_s)
    step = host.step or {"up": "ready"}.get(host.state, "")
    head: list[Span] = [
        (f" {mark} ", role),
        (fit(host.name, room, glyphs.more) + "  ", "title" if host.state == "failed" else "text"),
    ]
    if now_s is not None and width >= STAGES_FROM and not host.error:
        head += stages(host, glyphs, now_s)
    else:
        head.append((fit(step, 9, glyphs.more) + " ", role if host.state == "failed" else "dim"))
    indent = 3 + room + 2 + 10
    if not host.error:
        since = host.began.get(host.step)
        waits = since is not None and now_s is not None and host.step != "ready"
        age = f"  {values.elapsed(now_s - since)}" if waits and now_s is not None and since is not None else ""
        return [(*head, (clean(host.text), "dim"), ("" if width >= STAGES_FROM else age, "start"))]
    reason = wrap(host.error, max(20, width - indent - 1))
    rows: list[Row] = [(*head, (reason[0], "bad" if host.state == "failed" else "warn"))]
    rows += [((" " * indent + line, "bad"),) for line in reason[1:]]
    if host.hint:
        rows += [((" " * indent + line, "text"),) for line in wrap(host.hint, max(20, width - indent - 1))]
    return rows

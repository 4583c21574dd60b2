"""A shell on the terminal, and forwarded ports: what needs the selected node but changes no job.

In: a selection, answers of dialogs. Out: shells on the terminal; ports of this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import SuspendNotSupported

from supervisor.tui import terminal
from supervisor.tui.dialogs.ports import PortDialog, Ports
from supervisor.tui.dialogs.requests import PROBLEMS, Requests

if TYPE_CHECKING:
    from supervisor.actions import Action
    from supervisor.tui.shell import Level, Shell, Target
    from supervisor.tui.terminal import Lent


def target_name(shell: Shell, target: Target) -> str:
    """Return what is selected, in words."""
    if target.rank is not None:
        return f"rank {target.rank} on {target.node}"
    return target.node or shell.job_view.job or "the job"


class Programs:
    """The actions that run something on the terminal, or forward a port."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._requests = Requests(shell)

    def open_shell(self, action: Action, target: Target) -> None:
        """Open a shell where the selected rank runs."""
        node = self._one_node(action, target)
        if node is None:
            return

        async def use(terminal: Lent) -> None:
            await self._shell.source.shell(terminal, node, target.rank)

        async def run() -> None:
            try:
                await terminal.lend(self._shell.app, use)
            except SuspendNotSupported:
                self._requests.warn(f"{action.label}: this terminal cannot run one")
            except PROBLEMS as error:
                self._requests.refused(action.label, error)

        self._shell.app.run_worker(run, exit_on_error=False, exclusive=True, group="shell")  # type: ignore[arg-type]

    def _one_node(self, action: Action, target: Target) -> str | None:
        """Return the selected node; otherwise a notice, and None."""
        rows = self._shell.job_view.nodes
        # If the whole job is selected and has one node, that node is meant.
        node = target.node or (rows[0].name if len(rows) == 1 else None)
        if node is None:
            self._requests.warn(f"{action.label}: select a node or a rank")
        return node

    def ask_port(self, action: Action, target: Target) -> None:
        """Ask which port of the node is forwarded, and forward it or end that."""
        node = self._one_node(action, target)
        if node is None:
            return

        def asked(ports: Ports | None) -> None:
            if ports is not None:
                work = self._forward(action, node, ports)
                self._shell.app.run_worker(work, exit_on_error=False, group="forward")

        self._shell.app.push_screen(PortDialog(node, self._shell.source.forwards), asked)

    async def _forward(self, action: Action, node: str, ports: Ports) -> None:
        """Open a forwarded port; end it if it is open."""
        source, say = self._shell.source, self._shell.say
        for one in source.forwards:
            if (one.node, one.port) == (node, ports.node) and ports.here in (None, one.local):
                await one.close()
                say(f"{one.url} no longer leads to port {one.port} of {node}", title=action.label)
                return
        try:
            forward = await source.forward(node, ports.node, ports.here)
        except PROBLEMS as error:
            self._requests.refused(action.label, error)
            return
        text = f"{forward.url} leads to port {forward.port} of {node}"
        if not forward.is_answered:
            text += "\nNothing listens there yet. Start a program on the node; the port stays open."
        level: Level = "information" if forward.is_answered else "warning"
        say(f"{text}\nF lists it; y there copies the address.", title=action.label, level=level, seconds=15)

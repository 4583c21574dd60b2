"""Hosts over SSH: connect, push the agent, sync the work tree.

In: hosts of the inventory. Out: one NodeLink per host, or a HostError that says why not. Imports `errors`, `paths`,
`actions`, `standard_streams`, `ssh_library` and `inventory`; of the node's side `wire`, `text` and `history`.
"""

from supervisor.errors import HostError, SyncError
from supervisor.ssh.agent_file import AgentFile
from supervisor.ssh.answers import MalformedAnswer, read_refusal
from supervisor.ssh.link import NodeLink, connect, connect_all
from supervisor.ssh.scan import Tree, scan
from supervisor.ssh.sync import SyncResult, push_tree

__all__ = [
    "AgentFile",
    "HostError",
    "MalformedAnswer",
    "NodeLink",
    "SyncError",
    "SyncResult",
    "Tree",
    "connect",
    "connect_all",
    "push_tree",
    "read_refusal",
    "scan",
]

"""The node's end of one SSH connection: probe the node, sync the tree, start an agent, connect to it.

In: frames on stdin. Out: answers on stdout, then a plain pipe to the job's agent. Imports `wire`, `text`, `base`,
`runtime`, `vitals`, `engine`, `election` and `agent`.
"""

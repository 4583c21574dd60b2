"""Bring hosts up and start a job on them.

In: an inventory, options of `up`. Out: nodes that the coordinator may use. Imports `errors`, `inventory`, `ssh`, `link`
and `preflight`; of the node's side `wire` and `text`.
"""

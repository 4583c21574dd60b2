"""Bring hosts up and start a job on them.

In: an inventory, options of `up`. Out: nodes that the coordinator may use. Imports `link`, `ssh`, `preflight`.
"""

"""Verdicts of runs that are over.

In: the files that they left. Out: incidents and facts about NCCL, as in the contract; no cluster, no network. Imports
`errors`; of the node's side `wire`, `text` and `diagnose`.
"""

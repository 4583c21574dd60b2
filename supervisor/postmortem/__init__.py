"""Verdicts of runs that are over.

In: the files that they left. Out: incidents and facts about NCCL, as in the contract; no cluster, no network. Imports
`remote_agent.diagnose`, `remote_agent.wire.events` and `supervisor.errors`.
"""

"""Requests that change a job, and the repair of a job whose agents are gone.

In: a hub, an operator's request. Out: the coordinator's reply. Imports `errors`, `inventory`, `ssh`, `link` and
`launch`; of the node's side `wire` and `text`.
"""

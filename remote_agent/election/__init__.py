"""The other agents of a job, and which coordinator a node follows: connections, terms, votes, leases.

In: heartbeats and their answers, orders with their terms, requests for votes. Out: a node that may keep its workers or
must stop them; one coordinator. It sees the coordinator's role through a Protocol. Imports `wire`, `base` and
`coordinator`.
"""

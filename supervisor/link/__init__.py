"""The links to a job's hosts, the state of the job, and waiting for a change.

In: hosts of the inventory, SSH connections. Out: the hub that everything above takes. Imports `errors`, `inventory`,
`known` and `ssh`; of the node's side `wire` and `diagnose`.
"""

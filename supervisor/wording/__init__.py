"""Documents as text for people: values, status, events, incidents, stacks, usage, NCCL, lines of logs. Pure.

In: documents of the contract. Out: lines without colour, one fact a line. Imports `history`, `inventory`, `logs` and
`nccl`; of the node's side `wire`, `text`, `diagnose`, `snapshots` and `coordinator`.
"""

"""`supervisor check`: facts of the hosts, connections between them, and differences.

In: hosts of the inventory. Out: facts and findings. Imports `errors`, `inventory`, `ssh` and `link`; of the node's side
`wire` and `text`.
"""

"""`supervisor check`: facts of the hosts, connections between them, and differences.

In: hosts of the inventory. Out: facts and findings. Imports `inventory`, `ssh` and `link`.
"""

"""What a node uses, and what its system logged about a worker that died.

In: /proc, cgroups, file systems, the GPUs. Out: documents with their age, lines of evidence. Imports `wire`, `base` and
`diagnose`.
"""

"""The work tree on a node: manifest, sync, versions.

In: a manifest and contents named by their hash. Out: `trees/<tree>/` as the operator has it, and kept versions. Imports
`wire` and `base`.
"""

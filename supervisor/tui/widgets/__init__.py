"""The widgets, one module each; all draw rows of spans through `lines.LineView`.

In: rows. Out: strips of exact width. Imports `errors`, `inventory`, `logs`, `history` and `wording`; of the node's side
`wire` and `text`.
"""

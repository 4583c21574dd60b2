"""The screens, one module each.

In: views of the job. Out: rows for the widgets, requests of the user. Imports `errors`, `actions`, `inventory`,
`link`, `logs`, `history`, `nccl` and `wording`; of the node's side `wire` and `text`.
"""

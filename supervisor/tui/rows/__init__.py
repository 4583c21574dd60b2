"""What the screens show, as rows of spans of exact width: pure functions without a widget or a terminal.

In: a job view, documents of the job, a width, glyphs. Out: rows. Imports `history` and `wording`; of the node's side
`wire` and `text`.
"""

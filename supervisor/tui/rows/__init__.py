"""What the screens show, as rows of spans of exact width: pure functions without a widget or a terminal.

In: a snapshot, documents of the job, a width, glyphs. Out: rows. May import only the snapshot and `supervisor.wording`.
"""

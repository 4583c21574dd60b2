"""The log screen, composed of parts: what is shown, search, filter, one record, saving.

In: keys, the newest job view. Out: a feed in the view, and the position that the user chose in it. Imports `errors`,
`logs`, `session` and `wording`; of the node's side `wire` and `text`.
"""

"""What the log screen shows, seeks and takes: rows by number, by time or folded, hits.

In: pages and hits of a session. Out: rows and their places, for the view that draws them. Imports `errors`,
`logs` and `session`; of the node's side `wire` and `text`.
"""

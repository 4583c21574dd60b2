"""The logs of a job, merged over its nodes.

In: a selection of files and records; answers of the agents to log requests. Out: pages for a screen, hits of a search,
rows and bytes as they are written, and folds of lines that many ranks print. Imports `errors`, `ssh` and `link`; of the
node's side `wire` and `text`.
"""

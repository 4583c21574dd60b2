"""Dialogs over a screen: questions before a request is sent, pages to read, the palette and the help.

In: the `Shell`, a selection. Out: answers, and the requests that follow from them. Imports `errors`, `actions`,
`session`, `ssh` and `wording`; of the node's side `wire` and `text`.
"""

"""Where the ranks of a node run: an environment that is built there, a container, or behind a prefix of the user's.

In: what the job's description says, the work tree. Out: what is missing, made; the command that starts the engine
there. Imports
`wire`, `base`, `text` and `tree`.
"""

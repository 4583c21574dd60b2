"""What starts a node's workers: the engine itself, torch's elastic agent, or a torchrun that somebody else started.

In: an Order. Out: a WorkerGroup. To add a launcher, write a module with a `start` (`Launch` in launcher.py) and have
`launch` in engine.py choose it. Imports `wire`, `text`, `base`, `diagnose` and `vitals`.
"""

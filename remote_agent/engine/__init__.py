"""The agent's child process that has the workers: it starts, watches and stops the workers of one generation.

In: orders on stdin. Out: answers and notices on stdout; processes whose output goes straight to their files. torch is
imported in torch_api.py alone. Imports `wire`, `base`, `diagnose` and `vitals`.
"""

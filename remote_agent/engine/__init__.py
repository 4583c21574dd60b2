"""The agent's child process that has the workers: it starts, watches and stops the workers of one generation.

In: orders of the agent. Out: answers and notices; processes whose output goes straight to their files. torch is
imported in torch_api.py alone. Imports `wire`, `base`, `diagnose` and `vitals`.
"""

"""What every room of the node's side needs: paths, files, processes, tasks, clocks.

In: the environment, /proc, the file system. Out: plain values. Imports `wire`.
"""

"""Snapshots that ranks write: which are complete, the copies that a node keeps, and how one is put in place.

In: the working directory, the job's patterns, contents from other nodes. Out: kept copies under the job's directory,
named by their content; a working directory from which the next group resumes. The choice is plain data, which the
operator's side imports too. Imports `wire`, `base` and `tree`.
"""

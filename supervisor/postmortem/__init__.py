"""Verdicts of runs that are over.

In: the files that they left. Out: incidents and facts of NCCL, as the contract has them; no cluster, no network.
"""

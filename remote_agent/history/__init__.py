"""The history of one job on one node: what its ranks printed and what node and GPUs used, in bounded memory.

In: samples every two seconds. Out: for a series and a span, the least, mean and greatest value of each bucket; one file
of the job's directory. Imports `wire` and `base`.
"""

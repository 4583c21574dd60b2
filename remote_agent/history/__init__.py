"""The history of one job on one node: what its ranks printed and what node and GPUs used, in bounded memory.

In: samples every two seconds. Out: for a series and a span, the least, mean and greatest value of each bucket; one file
of the job's directory. The operator's side builds the same from a recording. Imports `wire` and `base`.
"""

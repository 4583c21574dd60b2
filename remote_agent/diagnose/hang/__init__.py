"""What holds a live group up: stalls, stragglers, unanswered connections. Pure.

In: two pulses of each rank, some seconds apart. Out: a Stall, a Straggler, the missing ranks. Imports `wire` and
`text`.
"""

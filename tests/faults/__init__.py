"""The fault matrix: a job on hosts of this machine, something done to it, and what must hold whatever that is.

In: names of faults (`matrix`) and seeds. Out: for each case what was measured, and every invariant (`invariants`) that
did not hold. `python -m tests.faults` runs them.
"""

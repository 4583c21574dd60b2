"""What live ranks are doing: pulses, stacks, child processes, sockets, NCCL's RAS service.

In: pids, worker server sockets. Out: plain values; None for what is missing or broken. Imports `wire`, `text`, `base`,
`diagnose` and `vitals`.
"""

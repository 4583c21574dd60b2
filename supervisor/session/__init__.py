"""One job seen from the operator's machine: launch it, find it, watch it, ask it to act.

In: an inventory. Out: `session.Session` and what it is made of; nothing is imported here, so that each verb loads only
what it needs.
"""

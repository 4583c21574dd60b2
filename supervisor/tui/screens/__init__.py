"""The screens, one module each.

In: snapshots of the session. Out: rows for the widgets, requests of the user.
"""

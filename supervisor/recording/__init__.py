"""A job as one file: written from a session, read back as what a session tells, at any time of the job.

In: a session; a file. Out: a file; a player that the screens take for a session. Nothing is imported here, so that each
verb loads only what it needs.
"""

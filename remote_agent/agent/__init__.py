"""The agent of one node in one job: the asyncio shell around election, coordinator, engine, logs and tree.

In: the job directory that `start` has written; requests of supervisors; frames of other agents. Out: orders, answers,
the journal. Imports every folder above.
"""

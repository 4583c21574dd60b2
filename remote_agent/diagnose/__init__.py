"""From the evidence of all ranks to one verdict. Pure: no files, no clock, no network.

In: RankEvidence of each rank (exits, error files, lines), JobContext; pulses of live ranks for `hang`; NCCL lines. Out:
an incident: one cause, its victims, where to look; facts about NCCL. Imports `wire` and `text`.
"""

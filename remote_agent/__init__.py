"""What runs on a node: standard library only, shipped as one zipapp; torch only in engine/torch_api and the workers.

In: frames from supervisors, from the other agents of the job and from this node's engine.
Out: worker processes, their files, the job's journal, answers.
"""

__version__ = "0.1.0"

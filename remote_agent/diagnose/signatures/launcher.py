"""Signatures of what schedulers, launchers and servers print about the processes that they started.

In: nothing. Out: ENDED, EXITED; WORKER_DIED, KILLS_ITSELF.
"""

from __future__ import annotations

import re

from remote_agent.diagnose.claims import TOLD
from remote_agent.diagnose.signatures.signature import CHILD_FAILED, DIED, ended, failed, killed_by, told

# A server prints these about a worker, with the expression for its name, and before it kills itself.
WORKER_DIED = "Worker ?[Pp]roc {} died unexpectedly"
KILLS_ITSELF = "Received sigquit from a child process"

# Who ends processes from outside says so: a person, an engine for containers, a cluster; and a host that goes down.
_TYPED = ("kill", "pkill", "killall", "scancel", "docker", "podman")
_OTHERS = (
    *("srun: interrupt", "sending Ctrl-C to", r"Forwarding signal \d+ to job", "[Uu]sing the force"),
    *(rf"{word}(?<={prompt} {word}) (?!ps|logs|run|exec)\S" for word in _TYPED for prompt in ("[$#]", "sudo")),
    *(r"failed (?:its |the )?\w+ probe", "longer than specified deadline", r"OOMKilled\W{1,4}(?i:false)"),
    *(
        r"TERM_(?:OWNER|ADMIN|FORCE_ADMIN|FORCE_OWNER|PREEMPT)\b",
        "TaintManagerEviction",
        r"interruption (?:notice|warning)\b",
    ),
    *(r"evicting pod\b", r"cordoned\b", r"[Kk]illing [^\n]{1,60} with (?:signal )?SIGKILL"),
    *(r"container (?:kill|stop)\b", r"[Mm]aintenance event\b", r"[Pp]reempted by\b"),
)
_HOSTS = (
    *("imminent node shutdown", r"node (?:has|had) died", r"systemd-shutdown\[", r"reboot: (?:Restarting|Power)"),
    r"node was (?:terminated|preempted|reclaimed|drained|shut down|rebooted)",
    r"[Ss]ystem (?:will (?:reboot|power off|halt)|is (?:rebooting|powering down|halting))",
    r"Power(?:ing [Oo]ff| key pressed)",
)
# These are said by who ends the rest of a job because of what has happened before.
_REACTIONS = (
    r"[Kk]illing (?:the |this |all )?(?:\w+ )?(?:allocation|job|step|tasks?|containers?|pods?|run|group|ranks)\b",
    *(r"[Tt]erminating StepId", "CANCELLED AT", "Job step aborted"),
)
KILLERS, REACTIONS = re.compile("|".join((*_OTHERS, *_HOSTS))), re.compile("|".join(_REACTIONS))

# These ended the job from outside.
ENDED = (
    failed(
        "signal_preempted",
        "DUE TO (?:PREEMPTION|TIME LIMIT)",
        r"[Rr]equeue[ds]? (?:the )?job",
        "after preemption",
        r"job killed: walltime \d+ exceeded",
        "TERM_RUNLIMIT",
        title="the scheduler ended the job",
    ),
    failed(
        "signal_preempted",
        r"Received (?:\d+|\S*SIG\w+) death signal",
        title="the launcher was told to end: by the scheduler, a person or another node's launcher",
    ),
    *(killed_by(*who, "signal_preempted", kind=TOLD) for who in (("SIGTERM", "Terminated"), ("SIGHUP", "Hangup"))),
    failed(
        "node_lost",
        "DUE TO NODE FAILURE",
        "srun: error: Node failure on",
        "ORTE has lost communication",
        r"NodeNotReady +node/",
        *_HOSTS,
    ),
    failed("signal_preempted", *_OTHERS, title="a person, or who runs the hosts or containers, ended it"),
    told(
        "signal_preempted",
        *("closing signal SIG", "Stopping container"),
        *("SignalException", "KeyboardInterrupt", r"got signal: 2\b", "Received SIGTERM: 15"),
    ),
)
# These say that a process failed, or that all were ended, but not why.
EXITED = (
    ended("signal_preempted", r"CANCELLED AT (?!\S+ DUE TO)", title="the scheduler ended the step"),
    ended(
        "user_exception",
        r"exitcode\s*:? [1-9]\d?\b",
        *(rf"{of} [1-9]\d?\b" for of in ("terminated with (?:exit )?code", "crashed with exit code", "return code =")),
        *(
            rf"{of} [1-9]\d?\b"
            for of in (
                "rank \\d+ exited with code",
                "exit with status code",
                r"Process name: .*\s+Exit code: *",
                "EXIT CODE:",
            )
        ),
        *("MPI_ABORT was invoked on rank", r"called MPI_Abort\("),
        title="exited with an error code, as after an exception; its own output does not say why",
        hint="check this rank's own stderr; with torchrun, use --redirects or --tee, and put @record on main",
    ),
    ended("other", WORKER_DIED.format(".{1,24}"), title=DIED),
    ended("other", KILLS_ITSELF, title=CHILD_FAILED),
    ended(
        "other",
        "A worker died or was killed while executing a task",
        # Ray names the workers of a group by their number in it.
        r"ActorDiedError(?:[\s\S]{0,400}?\n\s*name: \S+_\d+:(?P<rank>\d+)\n)?",
        "EngineDeadError",
        *("ChildFailedError", "one or more processes exited with non-zero status"),
        r"[Ss]ee (?:root cause above|(?:the )?stack trace)",
        r"Exited with exit code [1-9]",
    ),
)

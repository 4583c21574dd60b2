"""Signatures of the host: its memory, /dev/shm, and processes that crash.

In: nothing. Out: WHO_KILLED, MEMORY, CRASHES.
"""

from __future__ import annotations

from remote_agent.diagnose.claims import ENDED
from remote_agent.diagnose.signatures.signature import failed, killed_by

WHO_KILLED = (
    "likely the kernel's OOM killer, or a manual kill -9: check dmesg -T and the cgroup's memory.events on the node"
)
MEMORY = (
    failed(
        "host_oom_kill",
        "oom[-_]kill event",
        *("Out of memory: Killed process", "Memory cgroup out of memory"),
        r"task \d+: Out Of Memory",
        "Exceeded (?:job|step) memory limit",
        r"exceeded memory limit \(",
        "TERM_MEMLIMIT",
        *(r"\bOOMKilled\b(?!\W{1,4}(?i:false))", "low on resource: memory"),
        # Ray names the node and, of a group of workers, the number.
        r"node running low on memory(?:[\s\S]{0,200}?, name=\w+_\d+:(?P<rank>\d+), )?",
        *("invoked oom-killer", r"oomd?\[\d+\]: (?:Killed|sending SIG)"),
        title="killed by the host's OOM killer",
    ),
    killed_by(
        *("SIGKILL", "Killed", "host_oom_kill", r"Killed(?m:(?<=^Killed)$)", r"tasks? [\d,-]+: Killed\b"),
        title="killed by SIGKILL; out of memory is the usual cause, but the line does not say so",
        hint=WHO_KILLED,
        vague=True,
    ),
    failed(
        "host_oom_kill",
        r"\bMemoryError\b",
        "DefaultCPUAllocator: can.?t allocate memory",
        "Cannot allocate memory",
        "_ArrayMemoryError",
        "std::bad_alloc",
        hint="the host ran out of memory: use smaller buffers or fewer DataLoader workers",
    ),
    failed(
        "dataloader_worker_killed",
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?:exited unexpectedly|is killed by signal)",
    ),
    failed(
        "bus_error_shm",
        "Error while (?:creating|attaching to) shared memory segment",
        "Call to posix_fallocate failed",
        "failed to extend /dev/shm",
        "unable to (?:allocate|open|mmap|resize) shared memory",
        *("insufficient shared memory", "unable to write to file </torch_", "No space left on device: '/dev/shm/"),
    ),
    killed_by("SIGBUS", "Bus error", "bus_error_shm"),
)
CRASHES = (
    failed(
        "hang_no_output",
        r"task (?:python|pt_)\S* blocked for more than \d+ seconds",
        title="a process waits in the kernel, most often for storage",
        hint="check the mounts that it uses: the kernel's log has its stack",
    ),
    killed_by(
        "SIGSEGV", "Segmentation fault", "segfault", "Segmentation fault", "SIGSEGV rec", title="segmentation fault"
    ),
    killed_by("SIGILL", "Illegal instruction", "other", title="illegal instruction: built for another CPU"),
    killed_by("SIGFPE", "Floating point exception", "other", title="arithmetic error in native code"),
    failed(
        "sigabrt",
        *("double free", "corrupted size vs", "stack smashing detected", "pure virtual method called"),
        *(rf"{name}\(\): " for name in ("malloc", "malloc_consolidate", "realloc", "munmap_chunk")),
        r"free\(\): invalid",
    ),
    killed_by(
        *("SIGABRT", "Aborted", "sigabrt"),
        *("terminate called (?:without an active|after throw)", r"Aborted(?m:(?<=^Aborted)\b)"),
        kind=ENDED,
    ),
)

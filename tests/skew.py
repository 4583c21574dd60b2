"""Machines whose clocks are wrong: all that a process and its children see of wall time, the times of files as well.

In: a folder for the library; seconds, or a file with seconds that may change while the processes run.
Out: environment variables. The monotonic clocks stay as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CODE = r"""
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long constant;
static volatile long *place = &constant;
#define ahead (*place)
__attribute__((constructor)) static void begin(void) {
    constant = atol(getenv("SKEW_S") ?: "0");
    int file = open(getenv("SKEW_FILE") ?: "", O_RDONLY | O_CLOEXEC);
    void *shared = mmap(0, sizeof constant, PROT_READ, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) place = shared;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead;
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
static int seen(int failed, struct stat *found) {
    if (!failed) found->st_mtime += ahead, found->st_ctime += ahead, found->st_atime += ahead;
    return failed;
}
#define AT(name) int name(int folder, const char *path, struct stat *found, int flags) { \
    return seen((int)syscall(SYS_newfstatat, folder, path, found, flags), found); }
#define BY_PATH(name, flags) int name(const char *path, struct stat *found) { \
    return seen((int)syscall(SYS_newfstatat, AT_FDCWD, path, found, flags), found); }
#define OPEN(name) int name(int file, struct stat *found) { return seen((int)syscall(SYS_fstat, file, found), found); }
/* glibc has two names for each of them, one struct for both. */
AT(fstatat) AT(fstatat64)
BY_PATH(stat, 0) BY_PATH(stat64, 0)
BY_PATH(lstat, AT_SYMLINK_NOFOLLOW) BY_PATH(lstat64, AT_SYMLINK_NOFOLLOW)
OPEN(fstat) OPEN(fstat64)
typedef int wait_t(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
int pthread_cond_timedwait(pthread_cond_t *restrict it, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict until) {
    wait_t *wait = (wait_t *)dlsym((void *)-1l, "pthread_cond_timedwait");
    struct timespec end = *until;
    /* The kernel knows nothing of our clock; a deadline of the monotonic one is no time of day. */
    if (end.tv_sec > 1000000000) end.tv_sec -= ahead;
    return wait(it, lock, &end);
}
"""


def obstacle() -> str:
    """Return why no clock can be set wrong here; empty where it can."""
    return "" if shutil.which("cc") else "needs a C compiler"


def build(folder: Path) -> Path:
    """Build the library that sets clocks wrong; raises CalledProcessError."""
    library, source = folder / "skew.so", folder / "skew.c"
    source.write_text(CODE)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def environment(library: Path, ahead_s: int) -> dict[str, str]:
    """Return the variables under which a process lives so many seconds ahead, or behind."""
    return {**_loaded(library), "SKEW_S": str(ahead_s)}


def follow(library: Path, clock: Path) -> dict[str, str]:
    """Return the variables under which a process lives as many seconds ahead as `jump` has last written there."""
    return {**_loaded(library), "SKEW_FILE": str(clock)}


def jump(clock: Path, ahead_s: int) -> None:
    """Make the clock of the processes that follow this file jump; raises OSError."""
    clock.touch()
    with clock.open("r+b") as file:
        file.write(ahead_s.to_bytes(8, sys.byteorder, signed=True))


def _loaded(library: Path) -> dict[str, str]:
    return {"LD_PRELOAD": " ".join([str(library), *os.environ.get("LD_PRELOAD", "").split()])}

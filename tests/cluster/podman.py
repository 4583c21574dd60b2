"""Podman on the hosts of a cluster: each host has a store of its own, with one small image.

In: a Cluster. Out: `Podman`: what hosts.toml needs, what runs on a host; all of it removed with the cluster.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.stub import STUB

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/supervisor-test:1"
LIGHT_IMAGE = "localhost/supervisor-test:light"
"""Python there imports the torch of `tests/stub`."""
PROGRAMS = {"podman": "podman", "runc": "runc", "conmon": "conmon"}
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")
# A host has a /sys of its own, in which nothing is mounted.
CGROUPS = "\n".join(
    [
        "set -e; mount -t tmpfs cgroup /sys/fs/cgroup; cd /sys/fs/cgroup",
        *(f"mkdir {name}; mount -t cgroup -o {name} cgroup {name}" for name in CONTROLLERS),
        "mkdir systemd; mount -t cgroup -o none,name=systemd cgroup systemd",
    ]
)


@functools.lru_cache(maxsize=1)
def podman_obstacle() -> str | None:
    """Return why no container can be started here, for a skip; None when one can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None})
    if missing:
        return f"apt-get install {' '.join(missing)}"
    words = ["unshare", "--net", "--mount", "sh", "-c", f"mount -t sysfs sysfs /sys && {CGROUPS}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    return (
        None if done.returncode == 0 else f"no control groups for containers here: {done.stderr.partition(chr(10))[0]}"
    )


class Podman:
    """Makes every host of a cluster able to run containers; the image has this machine's programs as mounts."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        directory = cluster.directory / "podman"
        directory.mkdir()
        # The checkout may not be executable, and its file has no line that names an interpreter.
        runtime = directory / "runtime"
        runtime.write_text(f"#!/usr/bin/env python3\n{(ROOT / 'tests/cluster/oci_runtime.py').read_text()}")
        runtime.chmod(0o755)
        (directory / "containers.conf").write_text(f'[engine]\nruntime = "{runtime}"\ncgroup_manager = "cgroupfs"\n')
        _write_image(directory / "image.tar")
        self._directory = directory
        for host in cluster.hosts:
            self.boot(host.name)
            self.run(host.name, "import", str(directory / "image.tar"), IMAGE)
            change = ("--change", f"ENV PYTHONPATH={STUB}")
            self.run(host.name, "import", *change, str(directory / "image.tar"), LIGHT_IMAGE)

    def boot(self, host: str) -> None:
        """Make a host that has just been started able to run containers."""
        (self._directory / f"{host}.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{self._directory / host}"\nrunroot = "/run/containers"\n'
        )
        done = self.cluster.exec(host, ["sh", "-c", CGROUPS])
        assert done.returncode == 0, done.stderr

    @property
    def prelude(self) -> str:
        """The shell text of hosts.toml that has the agents use these stores."""
        return f". {self._write_prelude()}"

    def _write_prelude(self) -> Path:
        path = self._directory / "prelude.sh"
        conf = self._directory / "containers.conf"
        path.write_text(f'export CONTAINERS_CONF={conf} CONTAINERS_STORAGE_CONF="{self._directory}/$(hostname).conf"\n')
        return path

    def run(self, host: str, *words: str) -> str:
        """Run podman on a host; returns what it prints."""
        variables = {
            "CONTAINERS_CONF": str(self._directory / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self._directory / f"{host}.conf"),
        }
        done = self.cluster.exec(host, ["podman", *words], env=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def identity(self, image: str) -> str:
        """Return the digest of an image, which is the same on all hosts."""
        (found,) = {
            self.run(host.name, "image", "inspect", "--format", "{{.Id}}", image) for host in self.cluster.hosts
        }
        return found.strip()

    def names(self, host: str) -> list[str]:
        """Return the names of all containers on a host, running or not."""
        return self.run(host, "ps", "--all", "--format", "{{.Names}}").split()


def mounts() -> list[str]:
    """Return what the ranks need of this machine: the image itself is empty."""
    python = Path(sys.executable)
    places = [Path("/usr"), python.parent.parent, python.resolve().parent.parent, ROOT]
    # A mount at a place that another one contains would be hidden or hide it.
    chosen = [place for place in places if not any(other != place and other in place.parents for other in places)]
    return [f"{place}:ro" for place in dict.fromkeys(chosen)]


def _write_image(path: Path) -> None:
    """Write the image: directories, and the links that a merged /usr has."""
    with tarfile.open(path, "w") as tar:
        for name in ("etc", "proc", "sys", "dev", "run", "tmp", "usr", "var", "var/tmp"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            tar.addfile(entry)
        for name in ("bin", "sbin", "lib", "lib64"):
            if stat.S_ISLNK(os.lstat(f"/{name}").st_mode):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
                tar.addfile(entry)
        content = b'NAME="image of the tests"\n'
        entry = tarfile.TarInfo("etc/os-release")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))

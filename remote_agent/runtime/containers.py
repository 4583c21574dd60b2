"""Containers of Podman and Docker: the tool, the image, the command that starts one, its end.

In: an image, mounts, the variables of this login. Out: a prefix for a command; no container that nobody needs any more.
`docs/hosts.md` says what the prefix contains and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import getpass
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from remote_agent.base.files import read_json
from remote_agent.base.proc import USER_OPEN_FILES, children, last_line, reap, run_program
from remote_agent.runtime import tools
from remote_agent.wire import Problem

TOOLS = ("podman", "docker")
# An engine that answers at all answers within this time, also on a node that swaps.
TOOL_S = 60.0
TRIES = 3
LABEL = "supervisor.job"
HINT = "install podman or docker there, or use `wrap` for another one"
NVIDIA = Path("/dev/nvidiactl")
AMD = (Path("/dev/kfd"), Path("/dev/dri"))
INFINIBAND = Path("/dev/infiniband")
KERNEL_LOG = Path("/dev/kmsg")
LINGER = Path("/var/lib/systemd/linger")
CDI = (Path("/etc/cdi"), Path("/var/run/cdi"))


async def tool_for(image: str) -> str:
    """Return the path of podman, or of docker if podman is not there or only docker has the image; raises Problem."""
    tools = [path for tool in TOOLS if (path := shutil.which(tool)) is not None]
    if not tools:
        raise Problem("container", "neither podman nor docker is installed here", HINT)
    for tool in tools[1:]:
        # A tool that this user may not use is not in the way of the other one.
        with contextlib.suppress(Problem):
            if not await image_id(tools[0], image) and await image_id(tool, image):
                return tool
    return tools[0]


@dataclasses.dataclass(frozen=True)
class Container:
    """One container of a job: how it is started and ended."""

    tool: str
    """The path of podman or docker."""
    image: str
    name: str
    job: Path
    """The job's directory, by which a container is found when nobody knows its name any more."""

    @classmethod
    def new(cls, tool: str, image: str, job: Path) -> Container:
        """Return a container with a name of its own."""
        return cls(tool, image, f"supervisor-{job.name}-{secrets.token_hex(4)}", job)

    @property
    def is_podman(self) -> bool:
        """Whether podman runs it, by its own name."""
        return os.path.basename(self.tool) == "podman"

    def prefix(
        self, mounts: Sequence[str], workdir: str, variables: Sequence[str], is_rootless: bool, keeps_groups: bool
    ) -> list[str]:
        """Return what stands before the interpreter; `variables`: names whose values the tool takes from its own."""
        words = [self.tool, "run", "--rm", "--name", self.name, "--label", f"{LABEL}={self.job}", "--pull", "never"]
        # The ranks' output goes to files, and nothing else of ours is printed.
        words += ["--log-driver", "none"]
        for space in ("network", "ipc", "pid", "uts"):
            words += [f"--{space}", "host"]
        words += ["--cap-add", "SYS_PTRACE", "--security-opt", "label=disable", "--pids-limit", "-1"]
        words += [*self._user(is_rootless), *_groups(is_rootless, keeps_groups), *self._limits(is_rootless)]
        words += [*self._devices(), "--workdir", workdir]
        for mount in mounts:
            source, _, mode = mount.partition(":")
            words += ["--volume", f"{source}:{source}{f':{mode}' if mode else ''}"]
        for name in variables:
            words += ["--env", name]
        return words

    def _user(self, is_rootless: bool) -> list[str]:
        uid, gid = os.getuid(), os.getgid()
        if self.is_podman:
            return ["--userns", "keep-id"] if uid else []
        # In a rootless docker, root is this user.
        return [] if is_rootless else ["--user", f"{uid}:{gid}"]

    def _limits(self, is_rootless: bool) -> list[str]:
        if is_rootless:
            # Without root no limit can be raised.
            return ["--ulimit", "host"] if self.is_podman else []
        # Those of the user: this process has raised its own.
        soft, hard = USER_OPEN_FILES
        return ["--ulimit", f"nofile={soft}:{hard}", "--ulimit", "memlock=-1:-1"]

    def _devices(self) -> list[str]:
        words = []
        if NVIDIA.exists():
            words += ["--device", "nvidia.com/gpu=all"] if self.is_podman else ["--gpus", "all"]
        for device in (*(AMD if AMD[0].exists() else ()), INFINIBAND):
            if device.exists():
                words += ["--device", str(device)]
        if os.access(KERNEL_LOG, os.R_OK) and os.getuid() == 0:
            words += ["--device", f"{KERNEL_LOG}:{KERNEL_LOG}:r", "--cap-add", "SYSLOG"]
        return words

    def save(self, path: Path) -> None:
        """Note which container belongs to a job; raises OSError."""
        path.write_text(json.dumps({"tool": self.tool, "name": self.name}), encoding="utf-8")


def _groups(is_rootless: bool, keeps_groups: bool) -> list[str]:
    """Return the options for the further groups of this user, to which devices and data may belong."""
    groups = sorted({*os.getgroups()} - {os.getgid()}) if os.getuid() else []
    if groups and keeps_groups:
        return ["--group-add", "keep-groups"]
    # In a rootless container the numbers of the host mean other groups.
    return [] if is_rootless else [word for group in groups for word in ("--group-add", str(group))]


def saved(path: Path) -> list[str]:
    """Return the name of the container that was noted in a file, if one was."""
    name = read_json(path).get("name")
    return [name] if isinstance(name, str) else []


async def remove(tool: str, name: str) -> str:
    """End a container that may be gone already, with all that runs in it; returns why that failed, "" if it did not."""
    words = [tool, "rm", "--force", *(["--time", "0", "--ignore"] if os.path.basename(tool) == "podman" else []), name]
    why = ""
    # Podman waits in vain for what a monitor that was killed would have written; the next time it knows.
    for _ in range(TRIES):
        try:
            status, _, err = await run_program(words, TOOL_S)
        except (OSError, asyncio.TimeoutError) as error:
            return str(error) or f"no answer within {TOOL_S:.0f} s"
        if status == 0 or "no such container" in err.lower():
            return ""
        why = last_line(err)
    return why


def reap_monitors() -> None:
    """Reap podman's monitors that have ended: this process is the parent of all that it and its children started."""
    for pid in children():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "conmon\n":
                reap(pid)


async def left_of(tool: str, job: Path) -> list[str]:
    """Return the names of the containers of a job that an earlier agent has left."""
    words = [tool, "ps", "--all", "--filter", f"label={LABEL}={job}", "--format", "{{.Names}}"]
    try:
        status, out, _ = await run_program(words, TOOL_S)
    except (OSError, asyncio.TimeoutError):
        return []
    return out.split() if status == 0 else []


async def image_id(tool: str, image: str) -> str:
    """Return the digest of an image's configuration, the same wherever it is the same image; "" if it is not here."""
    status, out, err = await _ask(tool, "image", "inspect", "--format", "{{.Id}}", image)
    if status == 0 and out:
        return out.strip().rpartition(":")[2]
    if "permission denied" in err.lower() or "cannot connect" in err.lower():
        raise Problem("container", f"{os.path.basename(tool)}: {last_line(err)}", _rights(tool))
    return ""


def _rights(tool: str) -> str:
    if os.path.basename(tool) == "docker":
        return "is the docker service running, and are you in its group? `sudo usermod -aG docker $USER`, log in again"
    return f"try there: {tool} info"


async def is_rootless(tool: str) -> bool:
    """Tell whether a docker runs without root; podman's own user is known without asking."""
    if os.path.basename(tool) == "podman":
        return os.getuid() != 0
    return "rootless" in (await _ask(tool, "info", "--format", "{{.SecurityOptions}}"))[1]


async def keeps_groups(tool: str) -> bool:
    """Tell whether a container can keep the further groups of a user: podman's can, by crun."""
    if os.path.basename(tool) != "podman" or not os.getuid():
        return False
    return "crun" in (await _ask(tool, "info", "--format", "{{.Host.OCIRuntime.Name}}"))[1]


async def _ask(tool: str, *words: str) -> tuple[int | None, str, str]:
    try:
        return await run_program([tool, *words], TOOL_S)
    except (OSError, asyncio.TimeoutError) as error:
        name = os.path.basename(tool)
        why = str(error) or f"no answer within {TOOL_S:.0f} s"
        raise Problem("container", f"{name} {words[0]}: {why}", f"try there: {name} info") from error


async def is_here(image: str) -> bool:
    """Tell whether an image need not be pulled; raises Problem."""
    return bool(await image_id(await tool_for(image), image))


async def remarks(image: str) -> list[list[str]]:
    """Return what will go wrong with an image's containers here though the tool works: each a text and a way out."""
    tool, found = await tool_for(image), []
    user = getpass.getuser()
    if await is_rootless(tool) and Path("/run/systemd/system").exists() and not (LINGER / user).exists():
        text = f"systemd ends the containers of {user} when {user} is no longer logged in"
        found.append([text, f"sudo loginctl enable-linger {user}"])
    if os.path.basename(tool) == "podman" and os.getuid() and user not in _first_words(Path("/etc/subuid")):
        found.append([f"{user} has no line in /etc/subuid", f"sudo usermod --add-subuids 100000-165535 {user}"])
    if NVIDIA.exists() and not await _has_nvidia(tool):
        name = os.path.basename(tool)
        text = f"{name} knows no GPUs of NVIDIA, and this node has some"
        cdi = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
        docker = "sudo nvidia-ctk runtime configure --runtime=docker"
        found.append([text, f"install nvidia-container-toolkit, then {cdi if name == 'podman' else docker}"])
    return found


def _first_words(path: Path) -> list[str]:
    try:
        return [line.partition(":")[0] for line in path.read_text().splitlines()]
    except OSError:
        return []


async def _has_nvidia(tool: str) -> bool:
    if os.path.basename(tool) == "podman":
        return any(file.name.startswith("nvidia") for folder in CDI for file in folder.glob("*"))
    return "nvidia" in (await _ask(tool, "info", "--format", "{{json .Runtimes}}"))[1]


async def pull(tool: str, image: str, say: Callable[[str], None]) -> None:
    """Fetch an image, and pass on what the tool says; raises Problem."""
    name = os.path.basename(tool)
    try:
        await tools.run([tool, "pull", image], say)
    except (tools.Failed, OSError) as error:
        hint = f"is it named completely (registry/name:tag), and may this user pull it? Try there: {name} pull {image}"
        raise Problem("container", f"{image} cannot be pulled: {name} {error}", hint) from error

"""The environments of a node: built by the real uv and pip from small wheels, offline, and what interrupts a build."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remote_agent.base.files import try_lock
from remote_agent.base.paths import Home
from remote_agent.runtime.environments import Environment, Environments, Wanted
from remote_agent.runtime.project import InPlace
from remote_agent.wire import Problem
from tests.fast.test_tree import TREE, Node

UV = Path(sys.executable).parent / "uv"
REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not UV.exists(), reason="uv is not installed here")

# A build backend that needs no other package. Its name, version and requirements are in the project's own file.
BACKEND = """
import ast, os, pathlib, re, subprocess, time, zipfile
TEXT = pathlib.Path("pyproject.toml").read_text()
NAME = re.search(r'^name = "(.*)"', TEXT, re.M)[1]
NEEDS = ast.literal_eval(re.search(r"^dependencies = (.*)", TEXT, re.M)[1])

def build(folder, editable):
    if os.environ.get("TEST_BUILD_HANGS"):
        subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
        time.sleep(300)
    if os.environ.get("TEST_BUILD_COMPILES"):
        pathlib.Path(f"src/{NAME}/fast.so").write_text("")
    pathlib.Path(f"src/{NAME}.egg-info").mkdir(exist_ok=True)  # as setuptools does
    info = f"{NAME}-0.1.dist-info"
    files = {}
    if editable:
        files[f"_{NAME}.pth"] = f"{pathlib.Path('src').absolute()}\\n"
    else:
        files[f"{NAME}/__init__.py"] = pathlib.Path(f"src/{NAME}/__init__.py").read_text()
    needs = "".join(f"Requires-Dist: {each}\\n" for each in NEEDS)
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\\nName: {NAME}\\nVersion: 0.1\\n{needs}"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\\n{NAME}-run = {NAME}:main\\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\\n" for path in files) + f"{info}/RECORD,,\\n"
    name = f"{NAME}-0.1-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as file:
        for path, text in files.items():
            file.writestr(path, text)
    return name

def build_wheel(folder, config=None, metadata=None):
    return build(folder, False)

def build_editable(folder, config=None, metadata=None):
    return build(folder, True)
"""

# Another agent: it builds an environment in a process of its own, and prints what is said.
AGENT = """
import asyncio, os, sys
from pathlib import Path
from remote_agent.base.paths import Home
from remote_agent.runtime.environments import Environments, Wanted
print("started", flush=True)
wanted = Wanted(sys.argv[2], (), Path(sys.argv[3]))
say = lambda text: print(text, flush=True)
print("ready", asyncio.run(Environments(Home(Path(sys.argv[1]))).ensure(wanted, say, lambda _: None)).path, flush=True)
"""


def _wheel(folder: Path, name: str, version: str = "1.0", needs: tuple[str, ...] = ()) -> Path:
    """Make a wheel by hand."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"VERSION = '{version}'\ndef main():\n    print('{name} runs')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {each}\n" for each in needs),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-run = {name}:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for path, text in files.items():
            file.writestr(path, text)
    return wheel


class Site:
    """A node with a home, a work tree, an index of small wheels and a uv whose calls are logged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = Home(root / "home")
        self.environments = Environments(self.home)
        self.wheels = root / "wheels"
        self.tree = root / "work tree"
        self.calls = root / "calls"
        self.bin = root / "bin"
        self.said: list[str] = []
        self.claimed: list[str] = []
        for folder in (self.wheels, self.tree, self.bin):
            folder.mkdir()
        _wheel(self.wheels, "small")
        _wheel(self.wheels, "outer", needs=("small",))
        uv = self.bin / "uv"
        uv.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\nexec {UV} "$@"\n')
        uv.chmod(0o755)

    def write(self, files: dict[str, str]) -> None:
        """Write files of the tree."""
        for path, text in files.items():
            (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / path).write_text(text)

    def package(self, name: str, folder: str = ".", needs: tuple[str, ...] = ("outer",), more: str = "") -> None:
        """Write a package of the tree that the backend above builds."""
        project = (
            f'[project]\nname = "{name}"\nversion = "0.1"\nrequires-python = ">=3.9"\ndependencies = {list(needs)}\n'
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        code = "def main():\n    print('at', __file__)\n"
        self.write(
            {
                f"{folder}/pyproject.toml": project + more,
                f"{folder}/backend.py": BACKEND,
                f"{folder}/src/{name}/__init__.py": code,
            }
        )

    def lock(self) -> None:
        """Write uv.lock as a user does."""
        subprocess.run([UV, "lock", "-q"], cwd=self.tree, check=True)

    def wanted(self, file: str = "uv.lock", *extras: str) -> Wanted:
        """An environment for the tree as it is in place."""
        return Wanted(file, extras, self.tree)

    async def ensure(self, wanted: Wanted) -> Environment:
        """Build it if need be; what was said is remembered."""
        return await self.environments.ensure(wanted, self.said.append, self.claim)

    def claim(self, digest: str) -> None:
        """Note a use, while `clean` cannot remove what is used."""
        found = self.home.environments / digest
        assert not found.exists() or not self.environments.remove(found, list)
        self.claimed.append(digest)

    def builds(self) -> int:
        """How often uv has filled an environment."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return sum(line.startswith(("sync ", "pip install ")) for line in lines)

    def left(self) -> list[str]:
        """What is in the folder of environments, without the lock files."""
        if not self.home.environments.exists():
            return []
        return sorted(path.name for path in self.home.environments.iterdir() if path.suffix != ".lock")

    def processes(self) -> list[str]:
        """The command lines of processes that have this home in their command line or variables."""
        mark, found = os.fsencode(self.home.environments), []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdecimal() and int(process.name) != os.getpid():
                    line = (process / "cmdline").read_bytes()
                    if mark in line or mark in (process / "environ").read_bytes():
                        found.append(os.fsdecode(line.replace(b"\0", b" ")))
        return found

    def content(self) -> dict[str, bytes]:
        """Every file of the tree."""
        return {str(path.relative_to(self.tree)): path.read_bytes() for path in self.tree.rglob("*") if path.is_file()}

    def agent(self, file: str = "uv.lock", before: str = "") -> subprocess.Popen[str]:
        """Start another agent that wants the environment; `before`: what it does first."""
        command = [sys.executable, "-c", f"import os\n{before}{AGENT}", str(self.home.root), file, str(self.tree)]
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A node that reaches no index but a folder of wheels."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    site = Site(tmp_path)
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"):
        monkeypatch.setenv(name, "1")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(site.wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{site.bin}:{os.environ['PATH']}")
    yield site
    assert site.processes() == []


@pytest.fixture
def no_uv(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """No uv on PATH."""
    (site.bin / "uv").unlink()
    folders = [name for name in os.environ["PATH"].split(":") if not (Path(name) / "uv").exists()]
    monkeypatch.setenv("PATH", ":".join(folders))


def _runs(environment: Environment, code: str) -> str:
    variables = environment.variables({**os.environ, "PYTHONHOME": "/nowhere"})
    # The tree stays as it is: no bytecode.
    command = [str(environment.python), "-B", "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _script(environment: Environment, name: str) -> str:
    done = subprocess.run([environment.path / "bin" / name], capture_output=True, text=True, check=True)
    return done.stdout.strip()


async def _wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_project_is_installed_and_its_code_stays_in_the_tree(site: Site) -> None:
    site.package("mine", needs=("outer", "lib"), more='[tool.uv.sources]\nlib = { path = "libs/lib" }\n')
    site.package("lib", "libs/lib", needs=())
    site.lock()
    (site.tree / "data.bin").write_bytes(b"x" * 5_000_000)
    before = site.content()
    ready = await site.ensure(site.wanted())
    assert site.content() == before
    assert ready.path == site.home.environments / ready.digest
    assert site.left() == [ready.digest]
    assert _runs(ready, "import mine; print(mine.__file__)") == str(site.tree / "src/mine/__init__.py")
    assert _runs(ready, "import lib; print(lib.__file__)").startswith(str(ready.path))
    assert _script(ready, "mine-run") == f"at {site.tree / 'src/mine/__init__.py'}"
    assert _script(ready, "outer-run") == "outer runs"
    # Code that comes later is seen without a build.
    site.write({"src/mine/later.py": "WORD = 'later'"})
    assert await site.ensure(site.wanted()) == ready
    assert site.claimed == [ready.digest] * 2
    assert _runs(ready, "import mine.later; print(mine.later.WORD)") == "later"
    assert site.builds() == 1
    assert any(text.startswith("installed 4 packages in") for text in site.said)
    # No text file of the environment names what is gone now.
    traces = subprocess.run(["grep", "-rlE", r"\.(building|project)", ready.path], capture_output=True, text=True)
    assert traces.stdout == ""
    # uv's cache, to which the files are linked, has not been changed.
    shutil.rmtree(ready.path / "lib")
    assert not any(str(site.tree) in path.read_text() for path in (site.root / "cache").rglob("*.pth"))


async def test_the_variables_lead_into_the_environment(site: Site) -> None:
    ready = Environment("0" * 32, Path("/e/0"))
    assert ready.variables({"PATH": "/bin", "PYTHONHOME": "/x", "A": "1"}) == {
        "PATH": "/e/0/bin:/bin",
        "VIRTUAL_ENV": "/e/0",
        "A": "1",
    }
    assert ready.variables({})["PATH"].startswith("/e/0/bin:/")


async def test_looking_is_fast_and_builds_nothing(site: Site) -> None:
    site.package("mine")
    site.lock()
    # As long as the lock of a project that uses torch.
    (site.tree / "uv.lock").write_text((site.tree / "uv.lock").read_text() + f"# {'x' * 150}\n" * 3000)
    assert await site.environments.look(site.wanted()) is None
    ready = await site.ensure(site.wanted())
    took = []
    for _ in range(20):
        start = time.perf_counter()
        assert await site.environments.look(site.wanted()) == ready
        took.append(time.perf_counter() - start)
    assert min(took) < 0.010
    assert site.builds() == 1


async def test_a_large_package_is_read_once_and_off_the_loop(site: Site) -> None:
    """Again once it is another file of the same size, even if its time is the same."""
    package = site.tree / "big-1.0-py3-none-any.whl"
    package.write_bytes(b"a" * 100_000_000)
    site.write({"requirements.txt": f"./{package.name}\n"})
    begun, own = time.process_time(), time.thread_time()
    assert await site.environments.look(site.wanted("requirements.txt")) is None
    first, own = time.process_time() - begun, time.thread_time() - own
    begun = time.process_time()
    assert await site.environments.look(site.wanted("requirements.txt")) is None
    assert max(time.process_time() - begun, own) < first / 2
    tree, info = InPlace(site.tree), package.stat()
    before = tree.sha256(package.name)
    copy = package.with_name("copy")
    copy.write_bytes(b"b" * 100_000_000)
    os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
    copy.rename(package)
    assert tree.sha256(package.name) == hashlib.sha256(b"b" * 100_000_000).hexdigest() != before


async def test_another_lock_is_another_environment_and_the_first_stays(site: Site) -> None:
    site.write({"requirements.txt": "small\n"})
    first = await site.ensure(site.wanted("requirements.txt"))
    site.write({"requirements.txt": "outer\n"})
    second = await site.ensure(site.wanted("requirements.txt"))
    assert first.digest != second.digest
    assert _runs(first, "import small; print(small.VERSION)") == "1.0"
    assert _runs(second, "import outer; print(1)") == "1"
    assert sorted(site.left()) == sorted([first.digest, second.digest])
    site.write({"requirements.txt": "small\n"})
    assert await site.environments.look(site.wanted("requirements.txt")) == first


async def test_what_a_digest_depends_on(site: Site, tmp_path: Path) -> None:
    def digest(wanted: Wanted) -> str:
        return site.environments._request(wanted).digest

    site.package("mine", needs=("lib",), more='[tool.uv.sources]\nlib = { path = "libs/lib" }\n')
    site.package("lib", "libs/lib", needs=())
    site.lock()
    seen = [digest(site.wanted())]
    site.write({"train.py": "", "src/mine/more.py": ""})
    assert digest(site.wanted()) == seen[0]
    for path in ("libs/lib/src/lib/__init__.py", "setup.cfg", "uv.toml", ".python-version", "pyproject.toml"):
        with (site.tree / path).open("a") as file:
            file.write("\n# changed\n")
        seen.append(digest(site.wanted()))
    seen.append(digest(site.wanted("uv.lock", "b", "a")))
    assert digest(site.wanted("uv.lock", "a", "b")) == seen[-1]
    # The same tree at another place: an editable package leads there.
    shutil.copytree(site.tree, tmp_path / "copy")
    seen.append(digest(Wanted("uv.lock", (), tmp_path / "copy")))
    assert len(set(seen)) == len(seen)
    # Without local packages a place does not matter.
    for tree in (site.tree, tmp_path / "copy"):
        (tree / "requirements.txt").write_text("small\n")
    assert digest(Wanted("requirements.txt", (), tmp_path / "copy")) == digest(site.wanted("requirements.txt"))
    with pytest.raises(Problem, match=r"requirements.txt has no extras"):
        digest(site.wanted("requirements.txt", "a"))


async def test_a_kept_version_is_built_while_the_tree_stays(site: Site) -> None:
    node = Node(site.home.root)
    site.package("mine", needs=("small",))
    site.lock()
    old = {path: data.decode() for path, data in site.content().items()}
    node.push(old, digest="a" * 64)
    site.package("mine", needs=("outer",))
    site.lock()
    site.write({"src/mine/new.py": "NEW = 1"})
    new = {path: data.decode() for path, data in site.content().items()}
    node.stage(new, "b" * 64)
    place = node.root
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in place.rglob("*") if path.is_file()}
    ready = await site.ensure(Wanted("uv.lock", (), place, TREE, "b" * 64))
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in place.rglob("*") if path.is_file()}
    assert sorted(path.relative_to(place).as_posix() for path in before) == sorted(old)
    assert _runs(ready, "import outer, mine; print(mine.__file__)") == str(place / "src/mine/__init__.py")
    assert await site.environments.look(Wanted("uv.lock", (), place, TREE)) is None
    # Once it is in place, it is the same environment.
    node.switch("b" * 64)
    assert await site.environments.look(Wanted("uv.lock", (), place, TREE)) == ready
    assert _runs(ready, "import mine.new; print(mine.new.NEW)") == "1"


async def test_a_requirement_that_does_not_exist_is_named(site: Site) -> None:
    site.write({"requirements.txt": "small\nnothere>=2\n"})
    with pytest.raises(Problem, match=r"uv failed: .*nothere") as caught:
        await site.ensure(site.wanted("requirements.txt"))
    assert caught.value.kind == "environment"
    assert caught.value.hint
    assert len(caught.value.message) < 700
    assert site.left() == []


async def test_a_failed_build_shows_what_the_backend_has_said(site: Site) -> None:
    site.package("mine")
    site.lock()
    site.write({"backend.py": 'raise SystemExit("\\n".join(["line"] * 30) + "\\nno compiler xyz")'})
    with pytest.raises(Problem, match=r"Failed to build `mine.*no compiler xyz") as caught:
        await site.ensure(site.wanted())
    assert ".project" not in caught.value.message
    assert site.left() == []


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"requirements.txt": "../lib\n"}, r"requirements.txt names ../lib, which is outside of the work tree"),
        ({"requirements.txt": "-e /srv/lib\n"}, r"names /srv/lib, which is outside"),
        ({"requirements.txt": "-r more/a.txt\n"}, r"requirements.txt names more/a.txt, which is not in the work tree"),
        ({"requirements.txt": "-r a.txt\n", "a.txt": "-c ../b.txt"}, r"a.txt names ../b.txt, which is outside"),
        ({"requirements.txt": "./lib\n"}, r"names lib, which is no package in the work tree"),
        ({"pylock.toml": 'directory = { path = "../lib", editable = true }\n'}, r"names ../lib, which is outside"),
        ({"uv.lock": 'source = { editable = "../lib" }\n', "pyproject.toml": ""}, r"uv.lock names ../lib"),
        ({"uv.lock": ""}, r"no pyproject.toml beside uv.lock"),
        ({"uv.lock": "", "poetry.lock": ""}, r"poetry.lock is no list of packages"),
        ({}, r"names uv.lock, which is not in the work tree"),
    ],
)
async def test_what_cannot_be_built_on_a_node_is_refused(site: Site, files: dict[str, str], reason: str) -> None:
    site.write(files)
    named = next((name for name in ("poetry.lock", "uv.lock", "pylock.toml", "requirements.txt") if name in files), "")
    with pytest.raises(Problem, match=reason):
        await site.ensure(site.wanted(named or "uv.lock"))
    assert site.left() == []


async def test_requirements_with_files_packages_and_options(site: Site) -> None:
    site.package("mine", "packages/mine")
    site.package("lib", "packages/lib", needs=())
    _wheel(site.tree, "brought")
    site.write(
        {
            "env/gpu.txt": "# ours\n--no-index\n-r more/lib.txt  # and\n-c limits.txt\n"
            "./../brought-1.0-py3-none-any.whl\n-e ../packages/mine\n",
            "env/more/lib.txt": "lib @ file:../packages/lib\n",
            "env/limits.txt": "small==1.0\n",
        }
    )
    before = site.content()
    ready = await site.ensure(site.wanted("env/gpu.txt"))
    code = "import mine, lib, brought, outer; print(mine.__file__)"
    assert _runs(ready, code) == str(site.tree / "packages/mine/src/mine/__init__.py")
    assert site.content() == before
    for path in ("env/more/lib.txt", "env/limits.txt", "packages/lib/src/lib/__init__.py"):
        with (site.tree / path).open("a") as file:
            file.write("\n#\n")
        assert await site.environments.look(site.wanted("env/gpu.txt")) is None, path
        site.write({path: before[path].decode()})
    assert await site.environments.look(site.wanted("env/gpu.txt")) == ready


async def test_a_pylock_is_installed(site: Site) -> None:
    site.package("mine", needs=("outer", "lib"), more='[tool.uv.sources]\nlib = { path = "libs/lib" }\n')
    site.package("lib", "libs/lib", needs=())
    site.lock()
    command = [str(UV), "export", "-q", "--frozen", "--format", "pylock.toml", "-o", "pylock.toml"]
    subprocess.run(command, cwd=site.tree, check=True)
    ready = await site.ensure(site.wanted("pylock.toml"))
    assert _runs(ready, "import mine, outer; print(mine.__file__)") == str(site.tree / "src/mine/__init__.py")
    assert _runs(ready, "import lib; print(lib.__file__)").startswith(str(ready.path))


async def test_extras_and_a_project_without_a_package(site: Site) -> None:
    project = '[project]\nname = "mine"\nversion = "0"\nrequires-python = ">=3.9"\ndependencies = ["small"]\n'
    site.write({"pyproject.toml": f'{project}[project.optional-dependencies]\nfull = ["outer"]\n'})
    site.lock()
    plain, full = await site.ensure(site.wanted()), await site.ensure(site.wanted("uv.lock", "full"))
    code = "import importlib.util as u; print(bool(u.find_spec('small')), bool(u.find_spec('outer')))"
    assert (_runs(plain, code), _runs(full, code)) == ("True False", "True True")


async def test_the_project_says_which_python_and_the_job_overrules_it(site: Site) -> None:
    site.package("mine", needs=())
    site.lock()
    site.write({".python-version": "2.7\n"})
    with pytest.raises(Problem, match=r"2\.7"):
        await site.ensure(site.wanted())
    site.write({".python-version": f"{platform.python_version()}\n"})
    ready = await site.ensure(site.wanted())
    assert _runs(ready, "import platform; print(platform.python_version())") == platform.python_version()
    site.write({".python-version": "2.7\n"})
    await site.ensure(Wanted("uv.lock", (), site.tree, python=os.path.realpath(sys.executable)))
    with pytest.raises(Problem, match="no Python python2.0 on this node"):
        await site.ensure(Wanted("uv.lock", (), site.tree, python="python2.0"))


@pytest.mark.usefixtures("no_uv")
async def test_pip_builds_where_there_is_no_uv(site: Site) -> None:
    digest = hashlib.sha256((site.wheels / "small-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    site.write({"requirements.txt": f"small==1.0 --hash=sha256:{digest}\n"})
    ready = await site.ensure(site.wanted("requirements.txt"))
    assert _runs(ready, "import small; print(small.VERSION)") == "1.0"
    assert _script(ready, "small-run") == "small runs"
    assert "Usage" in _script(ready, "pip")
    assert site.said[-1] == "successfully installed small-1.0"
    site.write({"requirements.txt": f"small==1.0 --hash=sha256:{'7' * 64}\n"})
    with pytest.raises(Problem, match=r"pip failed: .*small==1.0.*Expected sha256 7777"):
        await site.ensure(site.wanted("requirements.txt"))
    assert site.left() == [ready.digest]
    for file in ("uv.lock", "pylock.toml"):
        site.write({file: "", "pyproject.toml": ""})
        with pytest.raises(Problem, match=f"{file} needs uv") as caught:
            await site.ensure(site.wanted(file))
        assert "pip install --user uv" in caught.value.hint


@pytest.mark.usefixtures("no_uv")
async def test_a_uv_that_was_brought_here_is_used(site: Site) -> None:
    site.package("mine")
    site.lock()
    ready = await site.ensure(Wanted("uv.lock", (), site.tree, uv=str(UV)))
    assert _runs(ready, "import outer; print(1)") == "1"


@pytest.mark.usefixtures("no_uv")
async def test_pip_installs_a_package_of_the_tree(site: Site) -> None:
    site.package("mine", needs=())
    site.write({"requirements.txt": "-e .\n"})
    before = site.content()
    ready = await site.ensure(site.wanted("requirements.txt"))
    assert site.content() == before
    assert _script(ready, "mine-run") == f"at {site.tree / 'src/mine/__init__.py'}"


@pytest.mark.parametrize("tool", ["uv", "pip"])
async def test_no_secret_is_shown(
    site: Site, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tool: str
) -> None:
    if tool == "pip":
        request.getfixturevalue("no_uv")
    for name in ("UV_OFFLINE", "UV_NO_INDEX", "PIP_NO_INDEX", "UV_FIND_LINKS", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    index = "http://user:pa55word-x@127.0.0.1:9/simple"
    for name, value in (("UV_INDEX_URL", index), ("PIP_INDEX_URL", index), ("MY_API_TOKEN", "tok-123456")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("PIP_RETRIES", "0")
    site.write({"requirements.txt": "small\n--extra-index-url http://me:0ther-pw@127.0.0.1:9/tok-123456/simple\n"})
    with pytest.raises(Problem) as caught:
        await site.ensure(site.wanted("requirements.txt"))
    shown = "\n".join((*site.said, caught.value.message, caught.value.hint))
    assert "127.0.0.1:9" in shown or "small" in shown
    assert not any(secret in shown for secret in ("pa55word-x", "tok-123456", "0ther-pw"))


async def test_what_a_tool_prints_is_cleaned(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "0pen-sesame")
    lines = [
        "Downloading torch (180.5MiB)",
        r"\033[1mfrom\033[0m https://who:s3cr3t@host/simple",
        "warning: Failed to hardlink files",
        " + torch==2.0",
        "x" * 100_000 + " s3cr3t-end",
        "  × error: no torch at https://s3cr3t@host/x",
        r"a\rb 0pen-sesame\007 c",
    ]
    text = r"\n".join(lines)
    (site.bin / "uv").write_text(f"#!/bin/sh\nprintf '{text}\\n'\nexit 3\n")
    site.write({"requirements.txt": "small\n"})
    with pytest.raises(Problem) as caught:
        await site.ensure(site.wanted("requirements.txt"))
    assert caught.value.message == "uv failed: error: no torch at https://***@host/x · a · b ***\\x07 c"
    assert site.said[0] == "downloading torch (180.5 MiB)"
    assert site.said[-1] == "b ***\\x07 c"


async def test_code_that_is_compiled_into_the_tree_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.package("mine")
    site.lock()
    monkeypatch.setenv("TEST_BUILD_COMPILES", "1")
    with pytest.raises(Problem, match=r"compiles src/mine/fast.so"):
        await site.ensure(site.wanted())
    assert site.left() == []


async def test_a_killed_build_leaves_nothing_that_is_used(site: Site) -> None:
    site.package("mine")
    site.lock()

    def agent() -> subprocess.Popen[str]:
        started = site.agent()
        assert started.stdout is not None
        assert started.stdout.readline() == "started\n"
        return started

    start = time.monotonic()
    with agent() as measured:
        assert measured.communicate()[0].splitlines()[-1].startswith("ready ")
    took = time.monotonic() - start
    moments = random.Random(7)
    for number in range(10):
        for path in site.environments.unused([]):
            assert site.environments.remove(path, list)
        assert site.left() == []
        with agent() as killed:
            time.sleep((number + moments.random()) / 10 * took * 0.9)
            killed.kill()
        ready = await asyncio.wait_for(site.ensure(site.wanted()), 30)
        assert site.left() == [ready.digest], number
        assert _runs(ready, "import mine, outer, small; print(1)") == "1"
        assert _script(ready, "outer-run") == "outer runs"


async def test_an_agent_that_is_killed_once_a_build_is_complete_leaves_nothing_else(site: Site) -> None:
    site.package("mine")
    site.lock()
    # The disk is slow to note the new name, and its agent is killed meanwhile.
    dies = "from remote_agent.runtime import environments\nenvironments.sync = lambda path: os.kill(os.getpid(), 9)\n"
    with site.agent(before=dies) as killed:
        assert killed.wait() == -signal.SIGKILL
    ready = await asyncio.wait_for(site.ensure(site.wanted()), 30)
    assert not site.said, "it was built again"
    assert site.left() == [ready.digest]


async def test_what_a_killed_agents_tool_has_started_does_not_hold_the_lock(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.package("mine")
    site.lock()
    monkeypatch.setenv("TEST_BUILD_HANGS", "1")
    with site.agent() as killed:
        await _wait_until(lambda: any(line.startswith("sleep 300") for line in site.processes()))
        killed.kill()
    # Nobody may build beside it until it has ended.
    locks = list(site.home.environments.glob("*.lock"))
    with open(locks[0], "r+b") as file:
        assert not try_lock(file.fileno())
    assert site.environments.unused([]) == []
    monkeypatch.delenv("TEST_BUILD_HANGS")
    ready = await asyncio.wait_for(site.ensure(site.wanted()), 20)
    assert site.left() == [ready.digest]


async def test_a_build_in_another_directory_with_the_same_path_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that shares the processes of its host."""
    site.package("mine")
    site.lock()
    monkeypatch.setenv("TEST_BUILD_HANGS", "1")
    with site.agent() as killed:
        await _wait_until(lambda: any(line.startswith("sleep 300") for line in site.processes()))
        killed.kill()
        killed.wait()
    ours, theirs = site.home.environments, site.root / "theirs"
    ours.rename(theirs)
    ours.mkdir()
    site.environments.end_orphans()
    assert any(line.startswith("sleep 300") for line in site.processes())
    ours.rmdir()
    theirs.rename(ours)
    site.environments.end_orphans()
    await _wait_until(lambda: site.processes() == [], 2)


async def test_two_nodes_with_one_home_build_once(site: Site) -> None:
    site.package("mine")
    site.lock()
    # The first one is slow, so that the second one must wait.
    uv = site.bin / "uv"
    uv.write_text(uv.read_text().replace("exec", "sleep 1\nexec"))
    with site.agent() as first, site.agent() as second:
        outputs = [process.communicate()[0].splitlines() for process in (first, second)]
    assert outputs[0][-1] == outputs[1][-1]
    assert outputs[0][-1].startswith("ready ")
    assert sum(lines.count("another job builds this environment") for lines in outputs) == 1
    assert site.builds() == 1


async def test_a_cancellation_ends_every_process(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.package("mine")
    site.lock()
    monkeypatch.setenv("TEST_BUILD_HANGS", "1")
    task = asyncio.ensure_future(site.ensure(site.wanted()))
    # uv, its backend, and a process that has left their session.
    await _wait_until(lambda: any(line.startswith("sleep 300") for line in site.processes()))
    assert len(site.processes()) >= 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert site.left() == []
    await _wait_until(lambda: site.processes() == [], 2)


async def test_a_silent_tool_is_killed_and_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remote_agent.runtime.tools.SILENCE_S", 1.0)
    (site.bin / "uv").write_text("#!/bin/sh\necho downloading huge\nsleep 300\n")
    site.write({"requirements.txt": "small\n"})
    with pytest.raises(Problem, match=r"uv was killed: it has printed nothing for .* min · downloading huge"):
        await site.ensure(site.wanted("requirements.txt"))


async def test_a_broken_environment_is_built_again(site: Site) -> None:
    site.write({"requirements.txt": "small\n"})
    ready = await site.ensure(site.wanted("requirements.txt"))
    # Its base interpreter was removed.
    ready.python.unlink()
    ready.python.symlink_to("/nowhere/python3")
    assert await site.environments.look(site.wanted("requirements.txt")) is None
    assert await site.ensure(site.wanted("requirements.txt")) == ready
    assert _runs(ready, "import small; print(1)") == "1"
    assert site.left() == [ready.digest]


async def test_unused_environments_are_found_but_none_that_is_being_built(site: Site) -> None:
    site.write({"requirements.txt": "small\n", "other.txt": "outer\n"})
    first, second = [await site.ensure(site.wanted(file)) for file in ("requirements.txt", "other.txt")]
    folder = site.home.environments
    left = folder / f"{'1' * 32}.{'a' * 8}.building"
    busy = folder / f"{'2' * 32}.{'b' * 8}.building"
    for path in (left, busy, folder / "notes"):
        path.mkdir()
    lock = os.open(folder / f"{'2' * 32}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        assert try_lock(lock)
        assert sorted(site.environments.unused([first.digest])) == sorted([left, second.path])
        assert not site.environments.remove(busy, list)
        assert not site.environments.remove(second.path, lambda: [second.digest]), "a job has claimed it since"
        assert site.environments.remove(second.path, list)
        assert site.environments.remove(left, list)
        assert site.environments.unused([first.digest]) == []
        assert await site.environments.look(site.wanted("other.txt")) is None
        assert await site.environments.look(site.wanted("requirements.txt")) == first
    finally:
        os.close(lock)
    assert json.dumps(site.left()) == json.dumps(sorted([first.digest, busy.name, "notes"]))

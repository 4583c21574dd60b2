"""hosts.toml: what is read, and one clear message for each thing that can be wrong with it."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import tomli

from supervisor.errors import HostError, UsageError
from supervisor.inventory import Host, Inventory, InventoryError, JobDefaults, load, local, sshconfig, targets
from supervisor.inventory.model import TABLES, Place
from supervisor.launch.specs import UpOptions, make_plan
from supervisor.ssh import settings
from tests.fast.cases import Case, read_cases


@pytest.fixture(autouse=True)
def home(ssh_home: Path) -> Path:
    """A home without an ssh configuration of its own."""
    return ssh_home


def _load(tmp_path: Path, text: str) -> Inventory:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    return load(path)


def _refused(tmp_path: Path, text: str) -> InventoryError:
    with pytest.raises(InventoryError) as refused:
        _load(tmp_path, text)
    assert str(tmp_path / "hosts.toml") in refused.value.message
    return refused.value


ONE = '[[hosts]]\nname = "n1"\n'
HOOK = ONE + '[[hooks]]\non = ["end"]\n'


def test_hooks_are_read_and_their_addresses_never_shown(tmp_path: Path) -> None:
    other = '[[hooks]]\non = ["failure", "hang"]\ncommand = "a | b"\nretries = 0\n'
    first, second = _load(tmp_path, HOOK + 'url = "https://h.org:8/s3cret?a=b"\n' + other).hooks
    assert (first.on, first.url, first.timeout, first.retries) == (("end",), "https://h.org:8/s3cret?a=b", 10.0, 3)
    assert (second.on, second.command, second.retries) == (("failure", "hang"), "a | b", 0)
    for rest in ("h.org/", "ftp://h/", "https:///", "https://h:x/", "https://h/é ", "https://[h/"):
        error = _refused(tmp_path, HOOK + f'url = "{rest}s3cret"\n')
        assert "[[hooks]] number 1.url: is not an http:// or https:// address" in error.message
        assert "s3cret" not in error.message + error.hint
    assert "contains a user name" in _refused(tmp_path, HOOK + 'url = "https://me:s3cret@h/"\n').message


def test_a_hook_may_speak_to_a_chat(tmp_path: Path) -> None:
    (hook,) = _load(tmp_path, HOOK + 'url = "https://h/x"\nkind = "slack"\n').hooks
    assert hook.kind == "slack"
    assert (
        "must be slack, discord or mattermost, not 'irc'"
        in _refused(tmp_path, HOOK + 'url = "https://h/x"\nkind = "irc"\n').message
    )
    assert "needs a url" in _refused(tmp_path, HOOK + 'command = "x"\nkind = "slack"\n').message


def described(inventory: Inventory, root: Path) -> list[str]:
    """What an inventory says that is not the default: a line for the job, and one for each host."""
    blank: dict[type, Any] = {Host: Host("", "", ""), JobDefaults: JobDefaults(root)}
    every: list[Any] = [inventory.job, *inventory.hosts]
    lines = []
    for one in every:
        default = dataclasses.asdict(blank[type(one)])
        own = {key: value for key, value in dataclasses.asdict(one).items() if value != default[key]}
        lines.append(" ".join(f"{key}={value}" for key, value in own.items()).replace(str(root), "."))
    return lines


@pytest.mark.parametrize("case", read_cases("inventories.txt"), ids=lambda case: case.fields[0])
def test_what_an_inventory_means(tmp_path: Path, case: Case) -> None:
    (tmp_path / "key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (_, text), (_, means) = case.blocks
    assert [line.rstrip() for line in described(_load(tmp_path, text), tmp_path)] == means.splitlines()


def test_the_example_of_the_repository_loads(repository: Path) -> None:
    inventory = load(repository / "hosts.example.toml")
    assert len(inventory.hosts) >= 2
    given = JobDefaults(repository, min_nodes=2, max_nodes=4, exclude=("*.pt", "data/"), env={"NCCL_DEBUG": "WARN"})
    assert inventory.job == given, "what the example sets beside these is the default"
    lines = (repository / "hosts.example.toml").read_text()
    every = {key for table in TABLES.values() for key in table}
    assert {key for key in every if not re.search(rf"(?:^#? ?|[{{ ,]){key} = ", lines, re.MULTILINE)} == set()


def test_files_are_relative_to_the_inventory_wherever_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("-----BEGIN PRIVATE KEY-----")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = '[job]\nworkdir = "../x"\n' + ONE + 'identity_file = "key"\nknown_hosts = "kh"\n'
    (tmp_path / "hosts.toml").write_text(text)
    inventory = load("../hosts.toml")
    assert inventory.hosts[0].identity_file is not None
    assert inventory.hosts[0].identity_file.samefile(tmp_path / "key")
    assert str(inventory.hosts[0].known_hosts).endswith("kh")
    assert os.path.realpath(inventory.job.workdir) == str(tmp_path.parent / "x")


def test_the_ssh_configuration_gives_the_peer_address(tmp_path: Path, home: Path) -> None:
    (home / ".ssh" / "config").write_text("Host gpu*\n  HostName %h.inside.example\n  Port 2222\n")
    hosts = _load(tmp_path, '[[hosts]]\nname = "gpu[1-2]"\n').hosts
    assert [(host.ssh, host.address) for host in hosts] == [
        ("gpu1", "gpu1.inside.example"), ("gpu2", "gpu2.inside.example"),
    ]  # fmt: skip


BAD = [*(f"a{sign}b" for sign in "$`;&|<>({*?~#!%,\t=/^"), "-a", "'a", '"a', "\\a", "é", "[a"]


@pytest.mark.parametrize("value", [*BAD, "a b", "a\nb", "", "x" * 300])
def test_no_value_that_a_shell_could_read_gets_through(value: str) -> None:
    for check in (targets.check_user, targets.check_host, targets.check_jump):
        if check is not targets.check_jump or "," not in value:
            with pytest.raises(targets.TargetError):
                check(value)


def test_what_hosts_and_users_are_called_gets_through() -> None:
    users = ["ubuntu", "a.b-c_d", "me@corp.example", "1000", "_ci", "me:target", "a+b"]
    assert [targets.check_user(user) for user in users] == users
    hosts = ["gpu1", "10.0.0.1", "fe80::1%eth0", "::1", "2001:db8::22", "::ffff:10.0.0.1", "a_b.example.org.", "xn--a"]
    assert [targets.check_host(host) for host in hosts] == hosts
    assert targets.check_jump("me@gate:22, [fe80::1]:22") == "me@gate:22,[fe80::1]:22"
    assert targets.check_jump("none") == "none"


def test_no_ssh_command_sees_a_value_unchecked(tmp_path: Path, home: Path) -> None:
    """`Match exec` runs while the file is read, so the inventory's values are checked before."""
    marker = tmp_path / "ran"
    (home / ".ssh" / "config").write_text(f"Match exec 'touch {marker}'\n  ProxyCommand nc %r@%h %p\n")
    user = '"-oProxyCommand=touch pwned;#" x'
    assert "is not a user name" in _refused(tmp_path, ONE + f"user = '{user}'\n").message
    for bad in (Host("n1", "n1", "x", user=user), Host("n1", "a;b", "x"), Host("n1", "n1", "x", proxy_jump="a;b")):
        with pytest.raises(HostError, match="is not "):
            settings.for_host(bad)
    assert not marker.exists()


def test_ssh_is_asked_once_for_each_host_until_it_fails(home: Path) -> None:
    asked = home / "asked"
    (home / ".ssh" / "config").write_text(f'Match exec "echo %n >> {asked}"\n  User me\n')
    one, two = Host("n1", "n1", "x"), Host("n2", "n2", "x")
    for host in (one, two, one):
        settings.for_host(host)
    assert asked.read_text().split() == ["n1", "n2"]
    sshconfig.forget((one.ssh, one.ssh_options))
    settings.for_host(one)
    settings.for_host(two)
    assert asked.read_text().split() == ["n1", "n2", "n1"]


def test_without_an_ssh_program_there_is_no_configuration(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".ssh" / "config").write_text("Host n1\n  Port 2222\n")
    monkeypatch.setenv("PATH", str(home / "none"))
    found = settings.for_host(Host("n1", "n1", "x", user="me", known_hosts=home / "known hosts"))
    assert (found.host, found.port, found.user) == ("n1", 22, "me")
    assert found.known_hosts == (home / "known hosts",)


@pytest.mark.parametrize(
    ("line", "only_ssh"),
    [
        ("Port 2222", ""),
        ("IdentityFile /k\n  ForwardAgent yes\n  SendEnv *\n  GSSAPIAuthentication yes", ""),
        ("ControlMaster auto\n  ControlPath /c\n  StrictHostKeyChecking accept-new", ""),
        ("ProxyCommand ssh -W %h:%p gate", ""),
        ("KnownHostsCommand /k", "knownhostscommand"),
        ("ProxyCommand nc %h %p", "proxycommand"),
        ("Ciphers aes256-ctr\n  CertificateFile /k", "certificatefile, ciphers"),
        ("IdentityFile /keys/%h", "identityfile"),
        ("RevokedHostKeys /k", "revokedhostkeys"),
    ],
)
def test_options_that_only_ssh_can_carry_out_are_named(home: Path, line: str, only_ssh: str) -> None:
    (home / ".ssh" / "config").write_text(f"Host n1\n  {line}\n")
    assert settings.for_host(Host("n1", "n1", "x")).only_ssh == only_ssh


def test_a_working_directory_with_too_long_a_name_is_not_there(tmp_path: Path) -> None:
    inventory = _load(tmp_path, f'[job]\nworkdir = "{"x" * 5000}"\n' + ONE)
    with pytest.raises(UsageError, match="there is no such directory"):
        make_plan(inventory, UpOptions(script="t.py"), tmp_path)


MANY = "".join(f'[[hosts]]\nname = "{letter}[1-1366]"\naddress = "{letter}[1-1366]"\n' for letter in "abc")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{ONE}port = {'9' * 5000}\n", "not valid TOML"),
        (f"{ONE}port = {'[' * 5000}\n", "not valid TOML"),
        (f"{ONE}port = {'9' * 30}\n", "not valid TOML"),
        (f"{ONE}port = 0x{'f' * 5000}\n", "not valid TOML"),
        (f'[job]\nlog_bound = "{"9" * 5000}G"\n{ONE}', "must be a size"),
        (MANY, "[[hosts]] c[1-1366].name: with it the inventory has more than 4096 hosts"),
    ],
)
def test_what_is_far_too_large_is_an_error_of_the_file(tmp_path: Path, text: str, message: str) -> None:
    assert message in _refused(tmp_path, text).message


def test_this_machine_alone_needs_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    inventory = local()
    (host,) = inventory.hosts
    assert host.local
    assert inventory.path is None
    assert not inventory.job.sync
    assert inventory.job.workdir == tmp_path
    (tmp_path / "train.py").touch()
    spec = make_plan(inventory, UpOptions("train.py"), tmp_path).spec
    assert ([node.nproc_per_node for node in spec.nodes], spec.max_restarts) == (["1"], 0), "torchrun's own defaults"


@pytest.mark.parametrize("case", read_cases("inventory_mistakes.txt"), ids=lambda case: case.fields[0])
def test_each_mistake_has_one_clear_message(tmp_path: Path, home: Path, case: Case) -> None:
    """Blocks beside hosts.toml are files of ~/.ssh."""
    (tmp_path / "pub.pub").write_text("ssh-ed25519 AAAA me")
    files = dict(case.blocks)
    text = f"{files.pop('hosts.toml')}\n" if files else case.body
    for name, content in files.items():
        (home / ".ssh" / name).write_text(f"{content}\n")
    message, *hints = case.fields
    error = _refused(tmp_path, text)
    assert message in error.message
    assert all(hint in error.hint for hint in hints)
    assert isinstance(error, UsageError)
    assert error.exit_status == 2


@pytest.mark.parametrize(("table", "key"), [(table, key) for table, keys in TABLES.items() for key in keys])
def test_an_error_names_the_line_of_its_key_and_a_value_that_works(tmp_path: Path, table: str, key: str) -> None:
    header = f"[[{table}]]" if table in ("hosts", "hooks") else f"[{table}]"
    rest = "" if table == "hosts" else ONE
    error = _refused(tmp_path, f"# No key takes a date.\n{header}\n{key} = 2026-01-01\n{rest}")
    assert f"hosts.toml: line 3: {header}" in error.message
    assert f".{key}: must be " in error.message
    assert error.hint.startswith(f"write {key} = ")
    (value,) = tomli.loads(error.hint.removeprefix("write ").partition(" or ")[0]).values()
    TABLES[table][key](Place("hosts.toml", header), key, value)
    misspelt = _refused(tmp_path, f"{header}\n{key}x = 1\n{rest}")
    assert "hosts.toml: line 2: " in misspelt.message
    assert misspelt.hint.startswith(f"did you mean {key}? for example {key} = ")


def test_the_file_itself_may_be_the_mistake(tmp_path: Path) -> None:
    with pytest.raises(InventoryError, match="no such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(InventoryError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "hosts.toml").write_bytes(b'a = 1\nb = "\xff"\n')
    with pytest.raises(InventoryError, match="line 2: not UTF-8"):
        load(tmp_path / "hosts.toml")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_bytes(b"\xef\xbb\xbf" + ONE.encode())
    assert [host.name for host in load(tmp_path / "hosts.toml").hosts] == ["n1"]


def test_an_unreadable_key_is_refused(tmp_path: Path) -> None:
    # Not by its mode: tests may run as root.
    error = _refused(tmp_path, ONE + 'identity_file = "/proc/self/mem"\n')
    assert "identity_file: /proc/self/mem cannot be read: Input/output error" in error.message
    assert "ls -l" in error.hint


def test_every_option_of_ssh_is_in_the_documentation_as_it_is_treated() -> None:
    """The table in docs/hosts.md has a row for what needs the ssh program; all other rows are about what does not."""
    text = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()
    table = text.partition("options of `man ssh_config`:\n\n")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines() if " | " in line]
    named = {name.lower(): effect for names, effect in rows[1:] for name in re.findall(r"\b[A-Z]\w+\b", names)}
    only_ssh = {name for name, effect in named.items() if "the ssh program is used wherever" in effect}
    # ProxyCommand has a rule of its own; the last three are no options of a host.
    others = named.keys() - only_ssh - {"proxycommand", "ignoreunknown", "include", "match"}
    assert {name for name in named if name in others and settings.AS_WELL.fullmatch(name) is None} == set()
    assert {name for name in only_ssh if settings.AS_WELL.fullmatch(name)} == set()
    known = sshconfig.resolve("n1").options.keys()
    assert known - named.keys() == set()

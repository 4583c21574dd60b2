"""hosts.toml: what is read, and one clear message for each thing that can be wrong with it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from supervisor.errors import HostError, UsageError
from supervisor.inventory import Host, Inventory, InventoryError, JobDefaults, load, local, sshconfig, targets
from supervisor.inventory.model import TABLES
from supervisor.launch.specs import UpOptions, make_plan
from supervisor.ssh import settings


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without an ssh configuration of its own."""
    place = tmp_path / "home"
    (place / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("USER", "me")
    return place


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
    text = (
        HOOK
        + 'url = "https://h.org:8/s3cret?a=b"\n[[hooks]]\non = ["failure", "hang"]\ncommand = "a | b"\nretries = 0\n'
    )
    first, second = _load(tmp_path, text).hooks
    assert (first.on, first.url, first.timeout, first.retries) == (("end",), "https://h.org:8/s3cret?a=b", 10.0, 3)
    assert (second.on, second.command, second.retries) == (("failure", "hang"), "a | b", 0)
    for url in (
        "h.org/s3cret",
        "ftp://h/s3cret",
        "https:///s3cret",
        "https://h:x/s3cret",
        "https://h/s3cret é",
        "https://[h/s3cret",
    ):
        error = _refused(tmp_path, HOOK + f'url = "{url}"\n')
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


def test_the_example_of_the_repository_loads(repository: Path) -> None:
    inventory = load(repository / "hosts.example.toml")
    assert len(inventory.hosts) >= 2
    given = JobDefaults(repository, min_nodes=2, max_nodes=4, exclude=("*.pt", "data/"), env={"NCCL_DEBUG": "WARN"})
    assert inventory.job == given, "what the example sets beside these is the default"
    lines = (repository / "hosts.example.toml").read_text()
    every = {key for table in TABLES.values() for key in table}
    assert {key for key in every if not re.search(rf"(?:^#? ?|[{{ ,]){key} = ", lines, re.MULTILINE)} == set()


def test_the_shortest_inventory(tmp_path: Path) -> None:
    inventory = _load(tmp_path, ONE)
    (host,) = inventory.hosts
    assert (host.name, host.ssh, host.address) == ("n1", "n1", "n1")
    assert (host.python, host.nproc_per_node) == ("python3", "auto")
    assert (host.user, host.port, host.identity_file, host.known_hosts) == (None, None, None, None)
    assert not host.local
    assert not host.spare
    job = inventory.job
    assert (job.min_nodes, job.max_nodes, job.max_restarts, job.sync, job.sync_limit_mb) == (1, 1, 3, True, 512)
    assert job.workdir == tmp_path
    assert inventory.host("n1") is host
    assert inventory.host("n2") is None


def test_the_contracts_example(tmp_path: Path, home: Path) -> None:
    (home / ".ssh" / "id_ed25519").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    inventory = _load(
        tmp_path,
        """
[job]
nproc_per_node = "auto"
min_nodes = 2
max_nodes = 4
max_restarts = 3
workdir = "work"
sync = true
exclude = ["*.pt", "data/"]
env = { NCCL_DEBUG = "WARN" }
coordinator_port = 0
ports = "29500 - 29999"
node_timeout = 15.0
stop_grace = 15.0
log_bound = "2G"
keep_warm = "10m"
[defaults]
user = "ubuntu"
port = 22
identity_file = "~/.ssh/id_ed25519"
known_hosts = "~/.ssh/known_hosts"
python = "python3"
prelude = "module load cuda"
proxy_jump = "login.example.org"
[[hosts]]
name = "gpu[01-16]"
ssh = "gpu[01-16].cluster"
address = "10.0.0.[1-16]"
nproc_per_node = 8
spare = false
env = { NCCL_SOCKET_IFNAME = "eth0" }
""",
    )
    assert [host.name for host in inventory.hosts] == [f"gpu{n:02}" for n in range(1, 17)]
    last = inventory.hosts[-1]
    assert (last.ssh, last.address, last.nproc_per_node) == ("gpu16.cluster", "10.0.0.16", "8")
    assert (last.user, last.port, last.prelude) == ("ubuntu", 22, "module load cuda")
    assert last.proxy_jump == "login.example.org"
    assert last.identity_file == home / ".ssh" / "id_ed25519"
    assert last.known_hosts == home / ".ssh" / "known_hosts"
    assert last.env == {"NCCL_SOCKET_IFNAME": "eth0"}
    job = inventory.job
    assert job.ports == "29500-29999"
    assert (job.min_nodes, job.max_nodes, job.exclude) == (2, 4, ("*.pt", "data/"))
    assert (job.workdir, job.env) == (tmp_path / "work", {"NCCL_DEBUG": "WARN"})
    assert job.log_bound == 2 * 1024**3
    assert job.keep_warm == 600.0


def test_a_host_wins_over_the_defaults(tmp_path: Path) -> None:
    text = '[job]\nnproc_per_node = 4\n[defaults]\nuser = "a"\nport = 1\n[[hosts]]\nname = "n1"\nuser = "b"\n'
    text += '[[hosts]]\nname = "n2"\nnproc_per_node = "npu"\nport = 2\nspare = true\n'
    first, second = _load(tmp_path, text).hosts
    assert (first.user, first.port, first.nproc_per_node, first.spare) == ("b", 1, "4", False)
    assert (second.user, second.port, second.nproc_per_node, second.spare) == ("a", 2, "npu", True)


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


def test_min_and_max_nodes_follow_the_hosts(tmp_path: Path) -> None:
    hosts = '[[hosts]]\nname = "n[1-3]"\n[[hosts]]\nname = "s1"\nspare = true\n'
    assert _load(tmp_path, hosts).job.min_nodes == 3
    assert _load(tmp_path, hosts).job.max_nodes == 3
    assert _load(tmp_path, "[job]\nmax_nodes = 2\n" + hosts).job.min_nodes == 2
    assert _load(tmp_path, "[job]\nmin_nodes = 4\n" + hosts).job.max_nodes == 4


def test_the_ssh_configuration_gives_the_peer_address(tmp_path: Path, home: Path) -> None:
    (home / ".ssh" / "config").write_text("Host gpu*\n  HostName %h.inside.example\n  Port 2222\n")
    hosts = _load(tmp_path, '[[hosts]]\nname = "gpu[1-2]"\n').hosts
    assert [host.address for host in hosts] == ["gpu1.inside.example", "gpu2.inside.example"]
    assert [host.ssh for host in hosts] == ["gpu1", "gpu2"]
    (home / ".ssh" / "config").write_text("Host gpu*\n  HostName 10.0.0.1\n")
    error = _refused(tmp_path, '[[hosts]]\nname = "gpu[1-2]"\n')
    assert "gpu1 and gpu2 are both at 10.0.0.1 port 22" in error.message
    (home / ".ssh" / "config").write_text("Host gpu*\n  Port abc\n")
    assert ".ssh/config line 2" in _refused(tmp_path, '[[hosts]]\nname = "gpu1"\n').message


BAD = [
    "-a",
    "'a",
    '"a',
    "\\a",
    "a$b",
    "a`b",
    "a;b",
    "a&b",
    "a|b",
    "a<b",
    "a>b",
    "a(b",
    "a{b",
    "a*b",
    "a?b",
    "a~b",
    "a#b",
    "a!b",
    "a%b",
    "a,b",
    "a\tb",
    "é",
    "a=b",
    "a/b",
    "[a",
    "a^b",
]


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


def test_no_command_of_the_ssh_configuration_sees_a_value_of_the_inventory_unchecked(
    tmp_path: Path, home: Path
) -> None:
    """`Match exec` runs while the file is read, so the inventory's values are checked before."""
    marker = tmp_path / "ran"
    (home / ".ssh" / "config").write_text(f"Match exec 'touch {marker}'\n  ProxyCommand nc %r@%h %p\n")
    user = '"-oProxyCommand=touch pwned;#" x'
    assert "is not a user name" in _refused(tmp_path, ONE + f"user = '{user}'\n").message
    with pytest.raises(sshconfig.SshConfigError, match="user: "):
        sshconfig.read_config("n1", user, None)
    with pytest.raises(sshconfig.SshConfigError, match="ssh: "):
        sshconfig.read_config("a;b", None, None)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("HostName $(x)", r"HostName of n1 in the ssh configuration: '\$\(x\)' is not a host name"),
        ("HostName %h;x", "HostName of n1 in the ssh configuration: 'n1;x' is not a host name"),
        ("User '-l x'", "User of n1 in the ssh configuration: '-l x' is not a user name"),
    ],
)
def test_the_ssh_configurations_own_values_are_checked_too(
    tmp_path: Path, home: Path, config: str, message: str
) -> None:
    (home / ".ssh" / "config").write_text(f"Host n1\n  {config}\n  ProxyCommand x %r %h\n")
    assert re.search(message, _refused(tmp_path, ONE).message)
    with pytest.raises(HostError, match=message):
        settings.for_host(Host("n1", "n1", "10.0.0.1"))


def test_an_ssh_configuration_that_includes_itself_is_named(tmp_path: Path, home: Path) -> None:
    config = home / ".ssh" / "config"
    config.write_text("Host *\nInclude more\n")
    (home / ".ssh" / "more").write_text("\nInclude config\n")
    message = _refused(tmp_path, ONE).message
    assert f"{home}/.ssh/more line 2: Include leads back to {config}" in message
    config.write_text("Include part0\n")
    for number in range(20):
        (home / ".ssh" / f"part{number}").write_text(f"Include part{number + 1}\n")
    assert "part15 line 1: Include" in _refused(tmp_path, ONE).message
    config.write_text("Include more more\n")
    (home / ".ssh" / "more").write_text("Host n1\n  Port 2222\n")
    assert len(_load(tmp_path, ONE).hosts) == 1


def test_an_ssh_configuration_that_takes_too_long_to_read_is_named(tmp_path: Path, home: Path) -> None:
    config, more = home / ".ssh" / "config", home / ".ssh" / "more"
    # As the fuzzer found it: a number of 200 kB.
    config.write_text("Host *\n    ServerAliveInterval " + "9" * 200_000)
    assert f"{config} line 2: longer than 8192 bytes" in _refused(tmp_path, ONE).message
    most = "the ssh configuration has more than 1024 KiB or 1024 files and Includes in total"
    config.write_text("# " + "x" * 98 + "\n" * 2_000_000)
    assert f"{config}: {most}" in _refused(tmp_path, ONE).message
    config.write_text("Include more more more\n")
    more.write_text(("# " + "x" * 98 + "\n") * 4000)
    assert f"{more}: {most}" in _refused(tmp_path, ONE).message
    config.write_text("Include none*\n" * 2000)
    assert f"{config}: {most}" in _refused(tmp_path, ONE).message
    # Each file includes the next one twice.
    for number in range(15):
        (home / ".ssh" / f"twice{number}").write_text(f"Include twice{number + 1} twice{number + 1}\n")
    config.write_text("Include twice0\n")
    assert most in _refused(tmp_path, ONE).message
    config.write_text("Include more\nHost n1\n  Port 2222\n")
    assert len(_load(tmp_path, ONE).hosts) == 1


@pytest.mark.parametrize("path", ["~nobody.here/x", "part**", "x" * 5000])
def test_a_path_of_the_ssh_configuration_that_is_none_is_an_error_of_it(tmp_path: Path, home: Path, path: str) -> None:
    (home / ".ssh" / "config").write_text(f"IdentityFile {path}\nUserKnownHostsFile {path}\n")
    assert settings.for_host(Host("n1", "n1", "10.0.0.1")).keys == ()
    (home / ".ssh" / "config").write_text(f"Include {path}\n")
    if path[0] != "x":
        assert "cannot read the ssh configuration" in _refused(tmp_path, ONE).message
    (home / ".ssh" / "config").write_text("IdentityFile \0\n")
    assert "config contains a NUL character" in _refused(tmp_path, ONE).message


def test_a_working_directory_with_too_long_a_name_is_not_there(tmp_path: Path) -> None:
    inventory = _load(tmp_path, f'[job]\nworkdir = "{"x" * 5000}"\n' + ONE)
    with pytest.raises(UsageError, match="there is no such directory"):
        make_plan(inventory, UpOptions(script="t.py"), tmp_path)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000, "9" * 30, "0x" + "f" * 5000])
def test_a_value_that_no_reader_of_toml_takes_is_an_error_of_the_file(tmp_path: Path, value: str) -> None:
    assert "not valid TOML" in _refused(tmp_path, f"{ONE}port = {value}\n").message


def test_a_size_of_thousands_of_digits_is_none(tmp_path: Path) -> None:
    assert "must be a size" in _refused(tmp_path, f'[job]\nlog_bound = "{"9" * 5000}G"\n{ONE}').message


def test_an_inventory_has_a_largest_number_of_hosts(tmp_path: Path) -> None:
    tables = "".join(f'[[hosts]]\nname = "{letter}[1-1366]"\naddress = "{letter}[1-1366]"\n' for letter in "abc")
    assert (
        "[[hosts]] c[1-1366].name: with it the inventory has more than 4096 hosts" in _refused(tmp_path, tables).message
    )


def test_supervisor_home_may_stand_with_the_workers_variables(tmp_path: Path) -> None:
    text = '[job]\nenv = { SUPERVISOR_HOME = "/a", X = "1" }\n[[hosts]]\nname = "n1"\n'
    text += '[[hosts]]\nname = "n2"\nenv = { SUPERVISOR_HOME = "/b" }\n'
    first, second = _load(tmp_path, text).hosts
    assert (first.env, second.env) == ({"SUPERVISOR_HOME": "/a"}, {"SUPERVISOR_HOME": "/b"})


def test_several_ports_of_the_loopback_address_are_several_hosts(tmp_path: Path) -> None:
    text = "".join(f'[[hosts]]\nname = "n{n}"\nssh = "127.0.0.1"\nport = {2200 + n}\n' for n in (1, 2))
    assert len(_load(tmp_path, text).hosts) == 2


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


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "has no hosts", "[[hosts]]"),
        ("[job]\n", "has no hosts", "[[hosts]]"),
        ('hosts = ["a"]\n', "must be a list of tables", "[[hosts]]"),
        ('[hosts]\nname = "a"\n', "must be a list of tables", "[[hosts]]"),
        ("job = 3\n" + ONE, "must be a table", "[job]"),
        ('[host]\nname = "a"\n', "host: unknown table", "[[hosts]]"),
        ('[default]\nuser = "a"\n' + ONE, "default: unknown table", "[defaults]"),
        ("min_nodes = 3\n" + ONE, "min_nodes: unknown table", "belongs in [job]"),
        ("[job]\nmin_node = 3\n" + ONE, "[job].min_node: unknown key", "did you mean min_nodes?"),
        ("[job]\nmin-nodes = 3\n" + ONE, "[job].min-nodes: unknown key", "did you mean min_nodes?"),
        ('[job]\nports = "29500"\n' + ONE, "[job].ports: '29500' is not FIRST-LAST", 'ports = "29500-29999"'),
        ('[job]\nports = "3-2"\n' + ONE, "[job].ports: '3-2' is not FIRST-LAST", "ports ="),
        ("[job]\nports = 29500\n" + ONE, "[job].ports: must be text", "ports ="),
        ("[job]\nzzz = 3\n" + ONE, "[job].zzz: unknown key", "known keys: coordinator_port"),
        ('[job]\nuser = "x"\n' + ONE, "[job].user: unknown key", "belongs in [defaults] or [[hosts]]"),
        (ONE + "min_nodes = 3\n", "[[hosts]] n1.min_nodes: unknown key", "belongs in [job]"),
        (ONE + 'adress = "x"\n', "[[hosts]] n1.adress: unknown key", "did you mean address?"),
        ("[[hosts]]\nssh = 'n1'\n", "[[hosts]] number 1.name: is missing", 'name = "gpu1"'),
        ("[[hosts]]\nname = 1\n", "[[hosts]] number 1.name: must be text in quotes", 'write name = "1"'),
        (ONE + "user = 7\n", "user: must be text in quotes, not a whole number", 'write user = "7"'),
        (ONE + 'user = ""\n', "user: is empty", "leave the key out"),
        (ONE + 'python = " python3"\n', "python: contains spaces", ""),
        (ONE + 'ssh = "me@n1"\n', "ssh: 'me@n1' contains a user name", 'user = "me"'),
        (
            ONE + 'ssh = "-oProxyCommand=x"\n',
            "[[hosts]] n1.ssh: '-oProxyCommand=x' is not a host name",
            "~/.ssh/config",
        ),
        (ONE + 'ssh = "bücher"\n', "[[hosts]] n1.ssh: 'bücher' is not a host name", "xn--"),
        (ONE + 'address = "$(x)"\n', "[[hosts]] n1.address: '$(x)' is not a host name", "IPv6"),
        (ONE + 'address = "10.0.0.1:22"\n', "[[hosts]] n1.address: '10.0.0.1:22' is not a host name", ""),
        (ONE + "user = '-l'\n", "[[hosts]] n1.user: '-l' is not a user name", "begins with a letter"),
        ("[defaults]\nuser = 'a;b'\n" + ONE, "[defaults].user: 'a;b' is not a user name", "letters, digits"),
        ("[defaults]\nproxy_jump = 'u@g,`x`'\n" + ONE, "[defaults].proxy_jump: '`x`' is not [user@]host[:port]", "me@"),
        (ONE + "proxy_jump = '$u@gate'\n", "[[hosts]] n1.proxy_jump: '$u@gate' is not [user@]host", "user name"),
        (ONE + 'address = "10.0.0.[1-2]"\n', "means 2 hosts, but name = 'n1' means 1", "same length"),
        ('[[hosts]]\nname = "n[1-3]"\nssh = "m[1-2]"\n', "means 2 hosts, but", "same length"),
        ('[[hosts]]\nname = "n[1-"\n', "bracket is not closed", "gpu[01-16]"),
        ('[[hosts]]\nname = "a b"\n', "'a b' is not 1 to 64 letters", ""),
        (ONE + 'port = "22"\n', "port: must be a whole number, not '22'", "write port = 22"),
        (ONE + "port = 0\n", "port: must be from 1 to 65535, not 0", ""),
        (ONE + "port = true\n", "port: must be a whole number", ""),
        (ONE + "nproc_per_node = 0\n", "must be auto, gpu, cpu, xpu or a number of 1 or more, not 0", "auto"),
        (ONE + 'nproc_per_node = "many"\n', "nproc_per_node: must be auto", "auto"),
        (ONE + "nproc_per_node = true\n", "nproc_per_node: must be auto", "auto"),
        (ONE + 'spare = "yes"\n', "spare: must be true or false", "spare = true"),
        (ONE + "env = { A = 1 }\n", "n1.env.A: must be text, not a whole number", 'A = "1"'),
        (ONE + "env = { A = true }\n", "n1.env.A: must be text", 'A = "true"'),
        (ONE + 'env = { "A B" = "1" }\n', "is not a valid name for an environment variable", ""),
        (ONE + 'env = "A=1"\n', "env: must be a table", "{ NAME"),
        ('[job]\nexclude = "*.pt"\n' + ONE, "exclude: must be a list", '["*.pt"'),
        ("[job]\nnode_timeout = 0\n" + ONE, "node_timeout: must be more than 0 seconds", ""),
        (
            "[job]\nnode_timeout = 2\n" + ONE,
            "node_timeout: must be at least 3 seconds, not 2",
            "write node_timeout = 3",
        ),
        ('[job]\nstop_grace = "5s"\n' + ONE, "stop_grace: must be a number of seconds", "15.0"),
        ("[job]\nstop_grace = nan\n" + ONE, "stop_grace: must be 0 or more seconds", ""),
        ("[job]\nmax_restarts = -1\n" + ONE, "max_restarts: must be 0 or more", ""),
        ("[job]\nmin_nodes = 2\n" + ONE, "min_nodes: is 2, but the inventory has 1 hosts", "1 or less"),
        ("[job]\nmin_nodes = 1\nmax_nodes = 0\n" + ONE, "max_nodes: must be 1 or more", ""),
        ('[job]\nmin_nodes = 2\nmax_nodes = 1\n[[hosts]]\nname = "n[1-2]"\n', "more than max_nodes", "swap"),
        (ONE + "spare = true\n", "every host is a spare", "spare = false"),
        (ONE + ONE, "two hosts are called n1", "needs its own name"),
        (ONE + '[[hosts]]\nname = "n2"\nssh = "N1."\n', "n1 and n2 are both at N1. port 22", "nproc_per_node"),
        (
            ONE + 'address = "10.0.0.1"\n[[hosts]]\nname = "n2"\naddress = "10.0.0.1"\n',
            "n1 and n2 have the same address 10.0.0.1",
            "other nodes",
        ),
        (ONE + 'proxy_jump = "a b"\n', "proxy_jump: 'a b' is not [user@]host[:port]", "login.example.org"),
        (ONE + 'proxy_jump = "a,,b"\n', "proxy_jump: '' is not", ""),
        (ONE + 'identity_file = "nokey"\n', "nokey: there is no such file", "correct the path"),
        (ONE + 'identity_file = "."\n', "is a directory", "name a file"),
        (ONE + 'identity_file = "pub.pub"\n', "is a public key", 'pub"'),
        (ONE + 'identity_file = "~nobody-of-that-name/k"\n', "identity_file: ~nobody", ""),
        (ONE + 'known_hosts = "."\n', "known_hosts: ", "name a file"),
        (ONE + "[hooks]\n", "hooks: must be a list of tables", "[[hooks]]"),
        ('[[hook]]\nurl = "x"\n' + ONE, "hook: unknown table", "[[hooks]]"),
        ("[job]\nretries = 3\n" + ONE, "[job].retries: unknown key", "belongs in [[hooks]]"),
        ("[job]\nmetrics_port = 70000\n" + ONE, "metrics_port: must be from 0 to 65535", ""),
        ("[job]\nlog_bound = 2000000000\n" + ONE, "log_bound: must be a size, not 2000000000", '"2G"'),
        ('[job]\nlog_bound = "2 K"\n' + ONE, "log_bound: must be 16M or more", ""),
        ('[job]\nkeep_warm = "soon"\n' + ONE, "keep_warm: must be a duration, not 'soon'", '"10m"'),
        ("[job]\nkeep_warm = true\n" + ONE, "keep_warm: must be a duration, not True", '"10m"'),
        (ONE + '[[hooks]]\nurl = "http://h/"\n', "[[hooks]] number 1.on: is missing", 'on = ["failure"'),
        (ONE + '[[hooks]]\non = "end"\n', "number 1.on: must be a list of events", 'on = ["failure"'),
        (ONE + '[[hooks]]\non = ["hangs"]\n', "'hangs' is not an event", "did you mean hang?"),
        (ONE + '[[hooks]]\non = ["end"]\n', "number 1: needs either command or url", "command ="),
        (HOOK + 'command = "x"\nurl = "http://h/"\n', "needs either command or url", "command ="),
        (HOOK + 'command = "x"\nretries = -1\n', "retries: must be from 0 to 20, not -1", ""),
        (HOOK + 'command = "x"\ntimeout = 0\n', "timeout: must be more than 0 seconds", ""),
        ("[[hosts]\n", "not valid TOML", "line 1 is: [[hosts]"),
        (ONE + 'x = "a\n', "line 3", "line 3 is: x ="),
    ],
)
def test_each_mistake_has_one_clear_message(tmp_path: Path, text: str, message: str, hint: str) -> None:
    (tmp_path / "pub.pub").write_text("ssh-ed25519 AAAA me")
    error = _refused(tmp_path, text)
    assert message in error.message
    assert hint in error.hint
    assert isinstance(error, UsageError)
    assert error.exit_status == 2


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

"""Which rank wrote which line of a text that several ranks write to.

In: lines. Out: the lines of each rank, and those of no rank. Tags understood: `[rank3]:` of torch,
`[rank: 3]` of Lightning, `[default3]:` of torchrun's tee, `node:3| ` of supervisor, `3: ` of srun -l, `[1,3]<stderr>:`
of mpirun and horovod, `[rank=3] ||` of Determined, `[Rank 3]` of NCCL's watchdog, `host:pid:tid [dev] NCCL` of NCCL,
`rank=3` and `TP3` in the prefixes of inference servers, Composer's sections, the last messages of launchers about a
rank; all of them also after a host, as pdsh prints it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from remote_agent.diagnose.hang.watchdogs import gave_up
from remote_agent.diagnose.signatures.launcher import KILLERS, WORKER_DIED
from remote_agent.diagnose.tracebacks import HEAD, LINKS, find_traces
from remote_agent.text.names import read_number
from supervisor.postmortem.lines import FileLine, untorn, without_collector, without_json, without_prefixes

# Tags of every line: a line without one belongs to no rank.
_LINE_TAGS = (
    # Runners may put the job, the stream or the time before it.
    re.compile(r"^(?:\S{1,60} ){0,8}?(?:\[default\d+\]:)?\[rank(?P<rank>\d+)\]: ?"),
    re.compile(r"^(?:\S{1,60} ){0,3}?\[rank=(?P<rank>\d+)\] \|\| ?"),
    re.compile(r"^(?:\S{1,60} ){0,3}?\[default(?P<rank>\d+)\]:"),
    re.compile(
        r"^(?:\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})?\[(?:\d+,)?(?:mpirank:)?(?P<rank>\d+)(?:,(?P<node>[\w.-]+))?\]<std"
        r"(?:out|err)>: ?"
    ),
    re.compile(r"^\[rank: (?P<rank>\d+)\] "),
    # torchrun's tee puts the role there, which may be called otherwise.
    re.compile(r"^\[(?:default|\w*(?:trainer|worker|learner|actor|rank))(?P<rank>\d+)\]:"),
    re.compile(r"^(?P<node>[\w.-]+):(?P<rank>\d+)\| "),
    # Open MPI puts the process id there when it reports a signal.
    re.compile(r"^\[(?P<node>[A-Za-z][\w.-]*):(?P<rank>\d{1,4})\](?! (?:\*\*\*|Signal|Failing|\[ ?\d+\]) ?)"),
)
_SRUN = re.compile(r"^ {0,3}(?P<rank>\d+): ")
# Tags of the first line of a record only: a traceback after it belongs to it.
_RECORD_TAGS = (
    re.compile(r"^\[(?:PG [^\]]*)?(?:[Rr]ank|RANK) (?P<rank>\d+)\]"),
    # In another group than the default one, a rank has another number.
    re.compile(r"^  what\(\):  \[(?:PG [^\]]*\(default_pg\) )?Rank (?P<rank>\d+)\]"),
    re.compile(r"^-- Process (?P<rank>\d+) terminated with the following error"),
    re.compile(r"^(?:\[[^\]]*\] ?)?\[[^\]]*\b[Rr]ank (?P<rank>\d+)\]"),
    re.compile(r"^\[[\d\-: ,.]+ (?:DP\d+ )?TP(?P<rank>\d+)\b[^\]]*\]"),
    # Loggers that put fields between bars.
    re.compile(r"^[\d\-T:., ]{8,30}(?:\| *\w+ *)?\| rank[=: ] {0,3}(?P<rank>\d+)(?:/\d+)? *\|"),
    re.compile(r"^time=\S+ level=\w+ rank=(?P<rank>\d+) "),
    # Huawei's collective library.
    re.compile(r"^\[[A-Z]+\] \S+ \(PID:\d+, Device:\d+, RankID:(?P<rank>\d+)\)"),
    # Servers put the parent processes of a worker before it.
    re.compile(r"^(?:\[[\dT:.Z-]+\] )?(?:\(\w+ pid=\d+\) )*\(\w+[ \[]rank=(?P<rank>\d+)\b[^)]*\)"),
    re.compile(r"^(?:\(\w+ pid=\d+\) )*\(\w*Worker[ _](?:DP\d+_)?TP(?P<rank>\d+)\w* pid=\d+\)"),
)
_SCHEDULER = re.compile(r"\bTP(?P<rank>\d+)\b[^\]]*\] Scheduler hit an exception")
# Ray prints the rank of a worker when it starts it, and its process before each line.
_RAY_RANK = re.compile(r"\bip=(?P<ip>[\w.:]+), pid=(?P<pid>\d+)\) world_rank=(?P<rank>\d+)")
_RAY = re.compile(r"^\(\w+ pid=(?P<pid>\d+), ip=(?P<ip>[\w.:]+)\) ?")
_TIME = re.compile(r"(?:\w{3} [ \d]\d [\d:]{8}|\d{4}-\d\d-\d\d[ T][\d:.,]{8,15}Z?) ")
_RECORD_BEGINS = frozenset("[(- 0123456789t")
# A match may not begin inside a word: the search would start again at each letter of a long word.
_NCCL = re.compile(
    r"(?<![\w.-])(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<device>\d+)\] (?=(?:\S{1,80} ){0,2}[NR]?CCL\b|[a-z/_]+\.cc)"
)
_NCCL_RANK = re.compile(r"\brank (?P<rank>\d+) nranks \d+|\brank (?P<rank2>\d+) nRanks \d+")
# torchrun's last message about a rank.
_FAILED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: (?P<rank>\d+) \(pid: \d+\)")
_CHILD = re.compile(r"^Child process \d+ \(local_rank (?P<rank>\d+)\) FAILED \(exitcode ")
_TORCH_TAG = re.compile(r"\[rank(\d+)\]")
# A launcher numbers the ranks of its node from 0; its summary, and torch's tag after its own, give the global rank.
_LOCAL = re.compile(r"local_rank|\[default\d+\]:$")
_LOCAL_TO_GLOBAL = re.compile(
    r"^\s*rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)|\[default(?P<local2>\d+)\]: ?\[rank(?P<rank2>\d+)\]"
)
# How many nodes, and processes on each, there are, as commands and launchers print it.
_SIZES = re.compile(
    r"\b(?P<name>n(?:um_)?nodes|nproc[_-]per[_-]node|num_local_procs|node[_-]rank|(?:dist_)?world[_ ]?size|WORLD_SIZE"
    r"|num[_-](?:of_)?processes)"
    r"['\"]?[=: ]{1,2}(?P<value>\d+)\b(?!:\d)|\b(?P<nodes>\d+) nodes\b"
)
_OF_A_NODE = 16
# Other words for the same; the last one is the number in "2 nodes".
_SAME = {
    "num_nodes": "nnodes",
    "nproc-per-node": "nproc_per_node",
    "num_local_procs": "nproc_per_node",
    "node-rank": "node_rank",
    **dict.fromkeys(("WORLD_SIZE", "num_processes", "num-processes", "num_of_processes"), "world_size"),
    "": "nnodes",
}
# Composer's launcher prints the output of its processes one after the other.
_SECTION = re.compile(r"^-+(?P<edge>Begin|End) global rank (?P<rank>\d+) STD(?:OUT|ERR)-+")
_COMPOSER = re.compile(r"Rank (?P<rank>\d+) crashed with exit code ")
_SUMMARY = re.compile(r"\s*(?:time|exitcode)\s*: (-?[\d:_-]+)")
_LAUNCHER = re.compile(r"torch[./]distributed[./](?:elastic|launcher|run)\b")
_LOGGED = re.compile(r"\bERROR\b")
# The line of an exception, with its class.
_RAISED = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))\b(?::.*|$)")
_BLAMES = re.compile(
    r"failed \(exitcode: (?!-15\b)-?\d+\) local_rank: |Child process with PID \d+ terminated with code (?!-15\b)"
    r"|^srun: error: \S+: tasks? [\d,-]+: Exited with exit code (?!143\b)"
)
_SPAWN = re.compile(
    r"[Pp]rocess (?<!\w.{8})(?P<rank>\d+) (?:terminated with (?:signal|exit code)|exit with status code) "
)
_MPI = re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node (?P<node>\S+) exited on signal ")
_PALS = re.compile(r"^(?:(?P<node>[\w.-]+): )?[Rr]ank (?P<rank>\d+):? (?:died from signal|exit[\w ]{0,18}?)[ :=]+\d")
_ABORT = re.compile(r"(?:MPI_ABORT was invoked on rank |called MPI_Abort\(.* - process )(?P<rank>\d+)\b")
_SERVER = re.compile(WORKER_DIED.format(r"(?:VllmWorker-|rank=\[)(?P<rank>\d+)\]?"))
_REPORTS = (_FAILED, _CHILD, _SPAWN, _MPI, _PALS, _ABORT, _COMPOSER, _SERVER)
# The lines of a launcher's banner before the one that names the rank.
_BANNER_HEAD = re.compile(r"^\s*(?:time\s*: |host\s*: (?P<node>\S+))")
# These are the banners of torchrun; of Open MPI, PRRTE and Horovod; and of Hydra.
_BANNER = re.compile(
    r"^(?:\s*rank\s*: (?=\d+ \(local_rank: )|\s*Process name: (?:\[\S+,)?(?=\d+\]?$)|= +RANK (?=\d+ PID ))(?P<rank>\d+)"
)
_BANNER_REST = re.compile(r"^\s*(?:exitcode|error_file|traceback|Exit code)\s*: |^= +(?:EXIT CODE|KILLED BY SIGNAL): ")
CONTINUES = re.compile(
    r"^\s|^$|^> File|^Traceback |^\w[\w.]*(?:Error|Exception|Interrupt)\b|^Exception raised from|^frame #\d+"
)
# A line about a process: of the kernel, of a library that caught a signal, of Ray.
OF_PROCESS = re.compile(
    r"^\[[\w.-]+:0*(\d+)(?: :\d+:\d+)?\] (?:\*\*\*|Signal: |Caught signal)|\bray::\S+ \(pid=(\d+)"
    r"|Killed process (\d+)\b|\btask [^\s:]+:(\d+) blocked for|\[PID: (\d+)\]|NVRM: Xid .* pid=(\d+)"
)
# No rank wrote these.
_OF_OTHERS = re.compile(f"{OF_PROCESS.pattern}|{KILLERS.pattern}")
_HOST = re.compile(
    # kubectl puts [pod/NAME/CONTAINER] there. The last two are of launchers that print the rank behind the host, and of
    # stern, which prints the container.
    r"^(?!\[?(?:\d{1,5}|[Rr]ank\S*)[\]:] )\[?(?:pod/)?(?=[\w.-]*[\d-])(?P<node>[\w.-]{1,64})(?:/[\w.-]+)?"
    r"(?:\] |: | +\| | (?=\d{1,5}: )|(?<=-\w) [a-z][\w-]{1,30} )"
)
# A process says which rank it is: where a host or a pod has one process, its other lines are of that rank.
_IS_RANK = re.compile(r"\bRANK[=:] *(?P<rank>\d+)\b")
# kubectl describes a pod from its name on: why its process ended, and further below the variables of it.
_POD, _POD_ENDED, _POD_LINES = re.compile(r"^Name: +\S"), re.compile(r"^\s+Reason: +(?:OOMKilled|Error)"), 60
# Prefixes that programs and container runtimes put before the lines of a process that they run.
_STREAM = re.compile(r"^(?:std(?:err|out): |\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) std(?:err|out) [FP] )")
_PREFIXED_SHARE = 0.6
_SRUN_LINES = ("srun: ", "slurmstepd: ")
_SRUN_SAYS = re.compile(r"^srun: error: (?P<node>[\w.-]+): task (?P<rank>\d+): ")
_SRUN_KILLED = re.compile(r"^srun: error: (?P<node>[\w.-]+): task (?P<rank>\d+): (?!Exited)")
_SRUN_STARTS = re.compile(r"\bsrun\b.*\bpython")
_SRUN_EXITED = re.compile(r"^srun: error: [\w.-]+: tasks? (?P<tasks>[\d,-]+): Exited with exit code")
_SRUN_SEVERAL = re.compile(r"^srun: error: [\w.-]+: tasks \d+[-,]")
# Where these start the ranks, a task of Slurm is not one rank.
_LAUNCHES = re.compile(r"torch[./]distributed[./](?:elastic|launcher|run)\b|torchrun|deepspeed|accelerate")


@dataclasses.dataclass
class RankLines:
    """What one rank wrote into a text; rank None: lines of no rank."""

    rank: int | None
    node: str | None = None
    lines: list[FileLine] = dataclasses.field(default_factory=list)
    blamed: bool = False
    """Whether the launcher reports that it failed by itself."""
    world: int = 0
    """How many ranks there are, as the text says; 0: it does not."""


def split_ranks(lines: Sequence[FileLine]) -> list[RankLines]:
    """Return the lines of each rank, those of no rank last."""
    by_rank: dict[int | None, RankLines] = {}
    lines = without_json(lines)
    # A quoted text may be indented as a whole.
    margin = min((len(line.text) - len(line.text.lstrip()) for line in lines if line.text.strip()), default=0)
    lines = [FileLine(line.number, _STREAM.sub("", line.text[margin:])) for line in lines]
    lines = without_collector(lines, _is_tag)
    reader = _Reader(lines)
    heads = _banner_heads(lines) | _pods(lines)
    for index, line in enumerate(lines):
        owner, node, text = heads[index] if index in heads else reader.owner(line.text)
        owners: Sequence[int | None] = reader.tasks_in(line.text) or [owner]
        for rank in owners:
            own = by_rank.setdefault(rank, RankLines(rank))
            own.node = own.node or node
            own.lines.append(FileLine(line.number, text, node))
            own.blamed = own.blamed or (rank is not None and _BLAMES.search(line.text) is not None)
    for own in by_rank.values():
        # What each host wrote stays in one piece.
        by_node: dict[str | None, list[FileLine]] = {}
        for line in own.lines:
            by_node.setdefault(line.node if own.rank is None else None, []).append(line)
        own.lines = [line for of_node in by_node.values() for line in of_node]
        own.lines = untorn(without_prefixes(own.lines))
        own.world = reader.layout.world
    _give_untagged(by_rank, reader.layout.world)
    return sorted(by_rank.values(), key=lambda own: (own.rank is None, own.rank or 0))


def _give_untagged(by_rank: dict[int | None, RankLines], world: int) -> None:
    """Give the lines without a tag to the ranks that wrote them, if that can be told.

    If as many processes as there are raised exceptions of one class, each rank has raised one. If only one did, it is
    the only rank that the launcher reports as failed, or all that it reports alike; not where a rank's own watchdog
    shows why it ended.
    """
    if None not in by_rank:
        return
    untagged = by_rank[None].lines
    launcher = _launcher_lines(untagged)
    written = [line for line in untagged if line.number not in launcher]
    raised = [at for at, line in enumerate(written) if _RAISED.match(line.text) and _ends_process(written, at)]
    several = Counter(_RAISED.sub(r"\1", written[at].text) for at in raised).most_common(1)
    count = several[0][1] if several else 0
    ranks = [own for own in by_rank.values() if own.rank is not None]
    blamed = [own for own in ranks if own.blamed]
    if count > 1:
        head = next((at for at, line in enumerate(written) if HEAD in line.text), len(written))
        first = next((at for at in raised if at > head), 0)
        if count == world == len(raised) and len(blamed) == len(ranks) and head < first:
            for rank in range(world):
                own = by_rank.setdefault(rank, RankLines(rank))
                own.lines = written[head : first + 1] + own.lines
            by_rank[None].lines = [line for line in untagged if line.number < written[head].number]
        return
    authors = _authors(ranks, blamed, len(raised))
    if authors and not any(gave_up("\n".join(line.text for line in own.lines)) for own in authors):
        written = [line for line in written if not _OF_OTHERS.search(line.text)]
        for own in authors:
            own.lines += written
        numbers = {line.number for line in written}
        by_rank[None].lines = [line for line in untagged if line.number not in numbers]


def _authors(ranks: Sequence[RankLines], blamed: Sequence[RankLines], raised: int) -> Sequence[RankLines]:
    """Return the ranks that wrote the untagged lines: the blamed one, with those that have its code in its second.

    Of several, only those that say nothing else, and only if the lines have a single exception: then it is of them all.
    """
    ends = [[match[1] for line in own.lines if (match := _SUMMARY.match(line.text))] for own in ranks]
    first = ends[ranks.index(blamed[0])] if blamed else []
    alike = [own for own, end in zip(ranks, ends, strict=True) if first and end == first]
    authors = blamed if len(blamed) > 1 or not alike else alike
    silent = not any(HEAD in line.text or _RAISED.match(line.text) for own in authors for line in own.lines)
    return authors if len(authors) == 1 or (raised == 1 and silent) else []


def _ends_process(lines: Sequence[FileLine], index: int) -> bool:
    """Return whether the exception that ends here may have ended its process: nobody logged it, or raised another."""
    if any(line.text.startswith(LINKS) for line in lines[index + 1 : index + 4]):
        return False
    head = next((at for at in range(index - 1, 0, -1) if HEAD in lines[at].text), 0)
    return not any(_LOGGED.search(line.text.partition(HEAD)[0]) for line in lines[max(0, head - 1) : head + 1])


def _launcher_lines(lines: list[FileLine]) -> set[int]:
    """Return the numbers of a launcher's lines: those that name it, and whole tracebacks through it.

    A traceback with an exception of the launcher itself is not taken whole: it reports the failure of a rank.
    """
    own = {line.number for line in lines if _LAUNCHER.search(line.text)}
    for trace in find_traces("\n".join(line.text for line in lines)) if own else ():
        *frames, last = (line.number for line in lines[max(0, trace.first_line) : trace.last_line + 1])
        if last not in own and not own.isdisjoint(frames):
            own.update(frames, [last])
    return own


def of_one_rank(lines: Sequence[FileLine]) -> list[FileLine]:
    """Return the lines of a file of a single rank, with the prefixes of tracebacks removed."""
    lines = [FileLine(line.number, _STREAM.sub("", line.text)) for line in without_json(lines)]
    return without_prefixes(without_collector(lines, _is_tag))


def _is_tag(prefix: str) -> bool:
    """Return whether a prefix names the rank or the host that wrote the line."""
    return _first((_HOST, *_LINE_TAGS, *_RECORD_TAGS), f"{prefix.rstrip()} ") is not None


class _Reader:
    """Finds the owner of each line, in order."""

    def __init__(self, lines: Sequence[FileLine]) -> None:
        self._hosts = _mostly(_HOST, lines)
        behind = [line._replace(text=_HOST.sub("", line.text)) for line in lines] if self._hosts else lines
        self._srun = _mostly(_SRUN, behind)
        several = any(_SRUN_SEVERAL.match(line.text) for line in lines)
        launches = any(_LAUNCHES.search(line.text) for line in lines)
        self._tasks = several and not launches
        # Where srun starts Python itself, each of its tasks is a rank.
        self._are_ranks = not launches and any(_SRUN_STARTS.search(line.text) for line in lines)
        self._tasks_of: dict[str, str | None] = {}
        if launches and self._srun:
            rows = (match for line in lines if (match := _SRUN_SAYS.match(line.text)))
            self._tasks_of = {"": None, **{match["rank"]: match["node"] for match in rows}}
        named = {host["node"] for line in lines if self._hosts and (host := _HOST.match(line.text))}
        self.layout = _Layout(lines, self._hosts, tasks=bool(self._tasks_of))
        self._ranks = _ranks_of_hosts(lines) if self._hosts else {}
        self._devices = _nccl_ranks(lines, several_hosts=len(named) > 1 or self.layout.nodes > 1)
        ranks = (match for line in lines if "world_rank" in line.text and (match := _RAY_RANK.search(line.text)))
        self._processes = {(match["pid"], match["ip"]): read_number(match["rank"]) for match in ranks}
        self._record: tuple[int | None, str | None] = (None, None)
        self._banner: int | None = None
        self._section: int | None = None

    def tasks_in(self, text: str) -> list[int]:
        """Return the ranks that ended as this line of srun says; none where its tasks may be launchers."""
        row = _SRUN_EXITED.match(text) if self._are_ranks else None
        spans = re.findall(r"(\d+)(?:-(\d+))?", row["tasks"]) if row is not None else []
        return [rank for low, high in spans for rank in range(read_number(low), read_number(high or low) + 1)]

    def owner(self, text: str) -> tuple[int | None, str | None, str]:
        """Return rank and node of a line, and its text without the tag of every line."""
        host = _HOST.match(text) if self._hosts else None
        if host is not None:
            rank, node, text = self._tagged(text[host.end() :], host["node"])
            return self._ranks.get(host["node"]) if rank is None else rank, node or host["node"], text
        return self._tagged(text, None)

    def _tagged(self, text: str, host: str | None) -> tuple[int | None, str | None, str]:
        # Most lines have no tag, and looking for a bracket is fast.
        marked = "[" in text or "|" in text
        # A time that a collector puts before the tag stays: the text then begins with it.
        time = _TIME.match(text) if marked else None
        begin = time.end() if time is not None else 0
        tagged = (_first(_LINE_TAGS, text[begin:]) if marked else None) or (_SRUN.match(text) if self._srun else None)
        if tagged is not None:
            self._record = (None, None)
            rest = text[:begin] + text[begin + tagged.end() :]
            if tagged.re is _SRUN and self._tasks_of:
                # The task is a launcher, of several ranks.
                rank, node = self._untagged(rest, self._tasks_of.get(tagged["rank"]))
                return rank, node or self._tasks_of.get(tagged["rank"]), rest
            return self._rank(tagged, host), tagged.groupdict().get("node"), rest
        return (*self._untagged(text, host), text)

    def _untagged(self, text: str, host: str | None) -> tuple[int | None, str | None]:
        section = _SECTION.match(text)
        if section is not None:
            self._section = read_number(section["rank"]) if section["edge"] == "Begin" else None
        if self._section is not None:
            return self._section, None
        process = _RAY.match(text) if text[:1] == "(" else None
        if process is not None and (process["pid"], process["ip"]) in self._processes:
            return self._processes[process["pid"], process["ip"]], process["ip"]
        record = _first(_RECORD_TAGS, text) if text[:1] in _RECORD_BEGINS else None
        # The processes of a server print at once: this may begin before another line has ended.
        record = record or (_SCHEDULER.search(text) if "Scheduler hit an exception" in text else None)
        if record is not None:
            self._record = (read_number(record["rank"]), None)
            return self._record
        nccl = _nccl(text)
        if nccl is not None:
            self._record = (None, None)
            return self._devices.get((nccl["host"], nccl["pid"])), nccl["host"]
        reported = self._launcher(text, host)
        if reported is not None:
            return reported
        if self._record[0] is not None and CONTINUES.match(text):
            return self._record
        self._record = (None, None)
        return None, None

    def _launcher(self, text: str, host: str | None) -> tuple[int | None, str | None] | None:
        banner = _BANNER.match(text)
        if banner is not None:
            self._banner = read_number(banner["rank"])
            return self._banner, None
        if self._banner is not None and _BANNER_REST.match(text):
            return self._banner, None
        self._banner = None
        own = (_SRUN_SAYS if self._srun else _SRUN_KILLED).match(text) if self._srun or self._tasks else None
        report = own or next((match for each in _REPORTS if (match := each.search(text))), None)
        return None if report is None else (self._rank(report, host), report.groupdict().get("node"))

    def _rank(self, match: re.Match[str], host: str | None) -> int | None:
        """Return the rank that a match names; None if ranks of several nodes have that number."""
        number = read_number(match["rank"])
        return self.layout.rank(number, host) if _LOCAL.search(match.group()) else number


class _Layout:
    """How many nodes and ranks a text speaks of, and which global rank is which local one."""

    def __init__(self, lines: Sequence[FileLine], has_hosts: bool, *, tasks: bool) -> None:
        self._tasks = tasks
        said: dict[str, set[int]] = {}
        hosts: set[str] = set()
        self._node_ranks: dict[str | None, int] = {}
        self._table: dict[int, int | None] = {}
        for line in lines:
            table = _LOCAL_TO_GLOBAL.search(line.text) if "rank" in line.text else None
            if table is not None:
                local, rank = (
                    read_number(table["local"] or table["local2"]),
                    read_number(table["rank"] or table["rank2"]),
                )
                self._table[local] = rank if self._table.get(local, rank) == rank else None
            host = _HOST.match(line.text) if has_hosts else None
            hosts |= set() if host is None else {host["node"]}
            for match in _SIZES.finditer(line.text):
                name = _SAME.get(match["name"] or "", match["name"])
                value = read_number(match["value"] or match["nodes"])
                if name == "node_rank":
                    self._node_ranks[None if host is None else host["node"]] = value
                said.setdefault(name, set()).add(value)
            if "--standalone" in line.text:
                said.setdefault("nnodes", set()).add(1)
        # One prefix on all lines may be of the only host, or of the job.
        self.nodes = max(said.get("nnodes", {len(hosts) if len(hosts) > 1 else 0}))
        self._per_node = said["nproc_per_node"].pop() if len(said.get("nproc_per_node", ())) == 1 else 0
        sizes = {size for name, found in said.items() if name.endswith("size") for size in found}
        self.world = sizes.pop() if len(sizes) == 1 else self.nodes * self._per_node

    def rank(self, local: int, host: str | None) -> int | None:
        """Return the global rank of a local one; None where the text does not tell it."""
        if local in self._table:
            return self._table[local]
        if host in self._node_ranks and self._per_node:
            return self._node_ranks[host] * self._per_node + local
        # A launcher that is a task of a scheduler is seldom the only one, and one node has seldom more ranks than this.
        is_one = self.nodes == 1 or (self.nodes == 0 and not self._tasks and self.world <= _OF_A_NODE)
        return local if is_one else None


def _ranks_of_hosts(lines: Sequence[FileLine]) -> dict[str, int]:
    """Return the rank of each host or pod whose lines state just one."""
    said: dict[str, set[int]] = {}
    for line in lines:
        host, rank = _HOST.match(line.text), _IS_RANK.search(line.text)
        if host is not None and rank is not None:
            said.setdefault(host["node"], set()).add(read_number(rank["rank"]))
    return {host: ranks.pop() for host, ranks in said.items() if len(ranks) == 1}


def _first(patterns: Iterable[re.Pattern[str]], text: str) -> re.Match[str] | None:
    for pattern in patterns:
        match = pattern.match(text)
        if match is not None:
            return match
    return None


def _nccl(text: str) -> re.Match[str] | None:
    """Return the match of NCCL's head of a line; most lines have none, and looking for a word is fast."""
    return _NCCL.search(text) if "CCL" in text or ".cc" in text else None


def _mostly(prefix: re.Pattern[str], lines: Sequence[FileLine]) -> bool:
    """Return whether most lines have this prefix: a task's number as with srun -l, or a host as with pdsh."""
    texts = [line.text for line in lines if line.text.strip() and not line.text.startswith(_SRUN_LINES)]
    tagged = sum(prefix.match(text) is not None for text in texts)
    return len(texts) > 1 and tagged >= _PREFIXED_SHARE * len(texts)


def _banner_heads(lines: Sequence[FileLine]) -> dict[int, tuple[int, str | None, str]]:
    """Return by index rank, node and text of the lines in a launcher's banner above the one that names the rank."""
    heads: dict[int, tuple[int, str | None, str]] = {}
    for index, line in enumerate(lines):
        banner = _BANNER.match(line.text)
        for before in range(max(0, index - 2), index) if banner is not None else ():
            head = _BANNER_HEAD.match(lines[before].text)
            if banner is not None and head is not None:
                heads[before] = read_number(banner["rank"]), head["node"], lines[before].text
    return heads


def _pods(lines: Sequence[FileLine]) -> dict[int, tuple[int, str | None, str]]:
    """Return by index rank, node and text of the lines that say how the process of a described pod ended."""
    ends: dict[int, tuple[int, str | None, str]] = {}
    for index, line in enumerate(lines):
        if _POD_ENDED.match(line.text) is None:
            continue
        below = itertools.takewhile(lambda each: not _POD.match(each.text), lines[index + 1 : index + _POD_LINES])
        rank = next((match for each in below if (match := _IS_RANK.search(each.text))), None)
        if rank is not None:
            ends[index] = read_number(rank["rank"]), None, line.text
    return ends


def _nccl_ranks(lines: Sequence[FileLine], several_hosts: bool) -> dict[tuple[str, str], int]:
    """Return the rank of each process in NCCL's lines: as NCCL prints it, or its device if there is only one host."""
    printed: dict[tuple[str, str], int] = {}
    seen: dict[tuple[str, str], set[int]] = {}
    for line in lines:
        nccl = _nccl(line.text)
        if nccl is None:
            continue
        process = (nccl["host"], nccl["pid"])
        seen.setdefault(process, set()).add(read_number(nccl["device"]))
        own = _NCCL_RANK.search(line.text)
        if own is not None:
            printed.setdefault(process, read_number(own["rank"] or own["rank2"]))
    one_host = len({host for host, _ in seen}) == 1 and not several_hosts
    # A thread that has set no device prints the first; a process with several devices prints more than one.
    candidates = {process: numbers - {0} or numbers for process, numbers in seen.items()}
    devices = {process: min(numbers) for process, numbers in candidates.items()}
    # Two processes with the same device are on different hosts.
    distinct = len(set(devices.values())) == len(devices) and all(len(numbers) == 1 for numbers in candidates.values())
    # A rank without such a device is on another node.
    tagged = {read_number(tag[1]) for line in lines if "[rank" in line.text and (tag := _TORCH_TAG.search(line.text))}
    all_here = tagged <= set(devices.values())
    return devices if one_host and distinct and all_here and not printed else printed

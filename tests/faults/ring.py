"""A small real job of ranks under mpirun, whose learner can be held, generators throttled and actors killed.

    with Ring(tmp_path, "run.total_train_steps=6").started() as ring:
        ring.wait_for("update", version=3)
        death = ring.kill("generator-0")
        ring.wait_for("joined", name="generator-0.1", after=death.t)
        ring.finish()
        ring.check_survived()

Lines of the journal carry `t`, seconds of the clock that `time.monotonic` reads here, too. A failure reports the
output of the job, the end of its journal and the verdict of `tools.why`.
"""

import contextlib
import heapq
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_bus.core.rows import RowOrder
from tests.launch.test_bootstrap import MPI
from tools import run as runs
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict, Judgement
from tools.follow import Place

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("ring.toml")
INSIDE = Path(__file__).with_name("inside")  # sitecustomize.py, for every process of a job
FOLDER = "AREAL_FAULTS"  # in the environment of every process of a job: the folder of its test
SPAWN = ('launch.start="spawn"', 'launch.bootstrap="mpi"')
POLL_S = 0.02
PATIENCE_S = 120.0  # a loaded machine with two cores starts a ring in less
GONE_S = 15.0
TAIL = 30

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal that was sent to an actor, or a fault that a failpoint applied to it."""

    name: str  # generator-0.1
    pid: int
    t: float  # when, as in the journal

    @property
    def next(self) -> str:
        """The next incarnation of its seat."""
        who, _, incarnation = self.name.rpartition(".")
        return f"{who}.{int(incarnation) + 1}"


class Ring:
    """One job, over all its starts."""

    def __init__(
        self,
        folder: Path,
        *changes: str,
        ranks: int = 4,
        config: Path = CONFIG,
        bootstrap: str = "mpi",
        before: Callable[[int], list[str]] = lambda rank: [],
        copies: bool = False,
    ) -> None:
        """`changes` as after --set; `bootstrap` "env" starts the ranks without mpirun, each behind `before(rank)`.
        `copies`: supervisors have memory for copies of a learner's state; else a dead one goes back to a checkpoint.
        """
        self.folder, self.changes, self.ranks = folder, changes, ranks
        self.config, self.bootstrap, self._before = config, bootstrap, before
        self.codes: list[int] = []  # of the processes of the last start, once they have ended
        self._processes: list[subprocess.Popen[str]] = []
        self._journals: dict[Path, JournalFile] = {}
        self._began, self._n_failpoints = 0.0, 0
        for name in ("failpoints", "failpoints_hit"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        replace(folder / "no_copies", "" if copies else "yes")

    # starting and ending

    def start(self, *arguments: str, changes: tuple[str, ...] = ()) -> "Ring":
        """Start the job, or start it again; `arguments` come after the config, as `--resume RUN`."""
        assert not self.is_up, "a job that runs must end before it is started again"
        self._began, self.codes = time.monotonic(), []
        settings = (f"run.folder='{self.folder / 'runs'}'", *self.changes, *changes)
        overrides = [word for setting in settings for word in ("--set", setting)]
        if self.bootstrap == "env":
            overrides += ["--set", "launch.bootstrap=env"]
        job = [sys.executable, "-m", "areal_bus.launch", str(self.config), *overrides, *arguments]
        self._processes = [self._spawn(*words) for words in self._command_lines(job)]
        return self

    @contextlib.contextmanager
    def started(self, *arguments: str) -> "Iterator[Ring]":
        """Start the job; all its processes are killed when the block ends."""
        try:
            yield self.start(*arguments)
        finally:
            self.end()

    def _command_lines(self, job: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        if self.bootstrap == "env":
            ids = {"WORLD_SIZE": str(self.ranks), "TORCHELASTIC_RUN_ID": f"{self.folder}-{self._began}"}
            return [([*self._before(rank), *job], ids | {"RANK": str(rank)}) for rank in range(self.ranks)]
        mpirun = str(Path(sys.executable).parent / "mpirun")
        return [([mpirun, "--oversubscribe", "-np", str(self.ranks), *job], dict(MPI))]

    def _spawn(self, words: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        path = os.pathsep.join([str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
        ours = {FOLDER: str(self.folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        outer = os.environ | ours | environment
        with (self.folder / "output.txt").open("a") as output:
            return subprocess.Popen(words, cwd=ROOT, env=outer, stdout=output, stderr=output, text=True)

    @property
    def is_up(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def send(self, number: signal.Signals) -> None:
        """A signal to mpirun (or to every rank that was started without it)."""
        for process in self._processes:
            process.send_signal(number)

    def finish(self, *, code: int = 0, timeout_s: float = PATIENCE_S, killed: Collection[int] = ()) -> None:
        """The job ends by itself, with this exit code (but for ranks that were killed), and leaves no process."""
        self.wait_until(lambda: not self.is_up, "the job ends", timeout_s=timeout_s, may_end=True)
        self.codes = [process.wait() for process in self._processes]
        ended = {found for rank, found in enumerate(self.codes) if rank not in killed}
        self.check(ended == {code}, f"the job ends with {code}: {self.codes}")
        self.wait_until(lambda: not self.pids(), f"no process is left: {self.pids()}", timeout_s=GONE_S, may_end=True)

    def kill_all(self) -> float:
        """SIGKILL every process of the job at once, mpirun first; returns when."""
        began = time.monotonic()
        while left := self.pids():
            for pid in sorted(left):
                _send(pid, signal.SIGKILL)
            self.check(time.monotonic() - began < GONE_S, f"killed processes go: {left}")
            for process in self._processes:
                process.poll()
            time.sleep(POLL_S)
        for process in self._processes:  # what is killed may have no environment any more, and not be gone yet
            process.wait(GONE_S)
        return began

    def end(self) -> None:
        """Kill and reap every process of the job."""
        self.kill_all()
        for process in self._processes:
            process.wait()

    # processes

    def pids(self) -> set[int]:
        """All live processes of the job, by a variable of their environment."""
        mark = f"{FOLDER}={self.folder}".encode()
        return {pid for pid in _all_pids() if mark in _read(pid, "environ").split(b"\0") and not _is_zombie(pid)}

    def actor(self, who: str) -> tuple[int, str]:
        """Process id and full name (generator-0.1) of the newest incarnation of this seat (generator-0)."""
        found: dict[int, tuple[int, str]] = {}
        for pid in _all_pids():
            for path in _open_files(pid):
                if path.parent == self.run / "journal":
                    name, incarnation, *_ = path.name.split(".")  # generator-0.1.jsonl, then generator-0.1.2.jsonl
                    if name == who:
                        found[int(incarnation)] = pid, f"{name}.{incarnation}"
        self.check(bool(found), f"{who} has a process")
        return found[max(found)]

    def kill(self, who: str, number: signal.Signals = signal.SIGKILL) -> Fault:
        """Send a signal to an actor; returns when a killed one has exited."""
        pid, name = self.actor(who)
        t = time.monotonic()
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self.wait_until(
                lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), f"{name} is gone", may_end=True
            )
        return Fault(name, pid, t)

    def kill_process(self, pid: int) -> None:
        """SIGKILL a process that an actor started."""
        os.kill(pid, signal.SIGKILL)
        self.wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), f"process {pid} is gone")

    def resume_process(self, pid: int) -> float:
        """Continue a stopped process; returns when."""
        self.wait_until(lambda: _state(pid) == b"T", f"process {pid} stands still")
        t = time.monotonic()
        os.kill(pid, signal.SIGCONT)
        return t

    def memory(self, who: str) -> int:
        """Bytes that an actor holds in memory."""
        pid, _ = self.actor(who)
        return int(_read(pid, "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    # output and journal of the job

    @property
    def run(self) -> Path:
        """The folder of the run that was started last."""
        return (self.folder / "runs" / "latest").resolve()

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    @property
    def version(self) -> int:
        """Of the newest update; 0 before the first."""
        updates = self.lines("update", role="head")
        return int(updates[-1]["version"]) if updates else 0

    def lines(self, *events: str, role: str | None = None, after: float = 0.0, **wanted: Any) -> list[Line]:
        """Lines of the journal with one of these events, later than `after`, with these values, in order of time."""
        if not (self.run / "journal").is_dir():
            return []
        files = [self._journals.setdefault(path, JournalFile(path)) for path in runs.Run(self.run).journals(role)]
        found = heapq.merge(*(file.read() for file in files), key=lambda line: float(line["wall"]))
        return [
            line
            for line in found
            if (not events or line["event"] in events)
            and line["t"] > after
            and all(line.get(k) == v for k, v in wanted.items())
        ]

    def wait_for(
        self,
        *events: str,
        role: str = "head",
        n: int = 1,
        after: float = 0.0,
        timeout_s: float = PATIENCE_S,
        **wanted: Any,
    ) -> Line:
        """Wait for the n-th such line."""
        what = f"{role} writes {n} x {' or '.join(events)} with {wanted} after {after:.3f}"
        self.wait_until(
            lambda: len(self.lines(*events, role=role, after=after, **wanted)) >= n, what, timeout_s=timeout_s
        )
        return self.lines(*events, role=role, after=after, **wanted)[n - 1]

    def wait_for_version(self, version: int, *generators: str) -> None:
        """Wait until each of these (generator-0.0) holds this version: it is fed from now on."""
        for name in generators:
            self.wait_for("member", name=name, version=version)

    def wait_until(
        self, condition: Callable[[], bool], what: str, *, timeout_s: float = PATIENCE_S, may_end: bool = False
    ) -> None:
        """Until it holds. Fails when it does not by the deadline, or (unless it may) when the job ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            is_up = self.is_up
            if condition():
                return
            self.check(is_up or may_end, f"{what}: the job has ended")
            self.check(time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s")
            time.sleep(POLL_S)

    # controls of the job

    def hold_learner(self, version: int | None) -> None:
        """The learner takes no batch at this version or above until the next call; None: no limit."""
        replace(self.folder / "hold_learner", "" if version is None else str(version))

    def throttle(self, seconds: float | None) -> None:
        """Every decode step of a generator takes this much longer; None: no delay."""
        replace(self.folder / "throttle", "" if seconds is None else str(seconds))

    def stop_sampling(self) -> None:
        """No generator decodes until the next `throttle`; they answer the head as before."""
        replace(self.folder / "throttle", "forever")

    def set_failpoint(self, point: str, how: str = "kill", *, who: str = "any", n: int = 1) -> None:
        """The next n actors (of this seat, as generator-0) that reach this failpoint of inside/sitecustomize.py
        suffer this fault: "kill", "stop" (SIGSTOP), "raise", or another kind that the failpoint applies itself.
        """
        for _ in range(n):
            self._n_failpoints += 1
            replace(self.folder / "failpoints" / f"{point}@{who}#{self._n_failpoints:04d}", how)

    def failpoint_hits(self, point: str | None = None, *, after: float = 0.0) -> list[Fault]:
        """Faults that failpoints (or this one) have applied."""
        try:
            lines = [json.loads(line) for line in (self.folder / "failpoint_hits.jsonl").read_text().splitlines()]
        except FileNotFoundError:
            return []
        return [
            Fault(line["name"], line["pid"], line["t"])
            for line in lines
            if point in (None, line["point"]) and line["t"] > after
        ]

    def wait_for_failpoint(self, point: str, *, after: float = 0.0, timeout_s: float = PATIENCE_S) -> Fault:
        """Wait until an actor hits this failpoint."""
        what = f"an actor hits failpoint {point}"
        self.wait_until(lambda: bool(self.failpoint_hits(point, after=after)), what, timeout_s=timeout_s)
        return self.failpoint_hits(point, after=after)[0]

    # verdicts

    def check(self, is_so: bool, what: str) -> None:
        if not is_so:
            raise AssertionError(f"{what}\n{self.report()}")

    def audited(self) -> dict[str, Judgement]:
        return judge(audit(runs.Run(self.run)))

    def check_survived(self, *, ended: bool = True) -> "History":
        """No invariant is broken, nothing is lost or trained twice. `ended`: the run came to its end."""
        judged = self.audited()
        broken = {name: j for name, j in judged.items() if j.verdict is InvariantVerdict.BROKEN}
        self.check(not broken, f"the audit is clean: {broken}")
        needed = {"I1", "I2", "I3", "I5", "I6", "I7", "I8", "I10", "I12", "journal"} | (
            {"I4", "I11"} if ended else set()
        )
        unseen = {
            name: j.why for name, j in judged.items() if name in needed and j.verdict is not InvariantVerdict.HOLDS
        }
        self.check(not unseen, f"the audit judges all: {unseen}")
        history = History.of(self.run)
        self.check(not history.skipped(self.run), f"no prompt is skipped: {history.skipped(self.run)}")
        self.check(not history.twice, f"nothing is trained twice: {history.twice}")
        self.check(history.versions == list(range(1, len(history.versions) + 1)), f"no gaps: {history.versions}")
        if ended:
            steps = json.loads((self.run / "config.json").read_text())["run"]["total_train_steps"]
            self.check(len(history.versions) == steps, f"{steps} updates survive: {history.versions}")
            self.check(not history.lost, f"every prompt is trained or refunded: {history.lost}")
            self.check(not history.trained_and_refunded, f"not both: {history.trained_and_refunded}")
        return history

    def report(self) -> str:
        """Output, journal, wait graph and errors of a failed job."""
        parts = [f"--- output of {self.folder}", *self.output.splitlines()[-TAIL:]]
        if (self.run / "journal").is_dir():
            tail = [line for line in self.lines() if line["event"] not in ("spans", "wait")][-TAIL:]
            parts += ["--- journal", *(json.dumps(line, separators=(",", ":"))[:240] for line in tail)]
            why = [sys.executable, "-m", "tools.why", str(self.run)]
            said = subprocess.run(why, cwd=ROOT, capture_output=True, text=True, check=False)
            parts += ["--- tools.why", said.stdout, said.stderr]
        for path in sorted((self.run / "logs").glob("*.error.txt")):
            parts += [f"--- {path.name}", path.read_text()[-2000:]]
        return "\n".join(parts)


class JournalFile:
    """A growing journal file. Each call of `read` parses only what is new, so that a test can poll it."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._lines = path, Place(), list[Line]()

    def read(self) -> list[Line]:
        """Its whole lines so far. A broken line, which a killed writer leaves, is skipped."""
        for raw in self._place.lines(self._path):
            with contextlib.suppress(ValueError):
                self._lines.append(runs.parse(raw))
        return self._lines


@dataclass
class History:
    """What is left of a run's history once each term has gone back to where it began: read from the head's lines."""

    admitted: dict[int, tuple[int, int]] = field(default_factory=dict)  # uid -> (epoch, row)
    trained: dict[int, int] = field(default_factory=dict)  # uid -> step
    refunded: dict[int, str] = field(default_factory=dict)  # uid -> reason
    versions: list[int] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)  # version -> of its weights
    rewards: dict[int, Any] = field(default_factory=dict)  # version -> mean reward of its batch
    twice: list[tuple[int, int]] = field(default_factory=list)  # (uid, sample)
    n_terms: int = 0
    _samples: Counter[tuple[int, int]] = field(default_factory=Counter)

    @staticmethod
    def of(run: Path) -> "History":
        history = History()
        for path in runs.Run(run).journals("head"):
            for line in runs.lines(path, "term", "admit", "trajectory", "refund", "update"):
                history._take(line)
        history.twice = [key for key, n in history._samples.items() if n > 1]
        return history

    @property
    def lost(self) -> set[int]:
        return set(self.admitted) - set(self.trained) - set(self.refunded)

    @property
    def trained_and_refunded(self) -> set[int]:
        return set(self.trained) & set(self.refunded)

    def rows(self) -> Counter[tuple[int, int]]:
        """How often each (epoch, row) is trained."""
        return Counter(self.admitted[uid] for uid in self.trained)

    def skipped(self, run: Path) -> set[tuple[int, int]]:
        """Of the first prompts in the order of the data, as many as were admitted: those (epoch, row) that were not."""
        settings = json.loads((run / "config.json").read_text())
        n_rows = json.loads((run / "origin.json").read_text())["rows"]
        order = RowOrder(n_rows, seed=settings["run"]["seed"], shuffle=settings["data"]["shuffle"])
        rows = set(self.admitted.values())
        return {order.row(k) for k in range(len(rows))} - rows

    def _take(self, line: Line) -> None:
        match line["event"]:
            case "term":
                self._go_back(line)
            case "admit":
                self.admitted[line["uid"]] = line["epoch"], line["row"]
            case "trajectory":
                self._samples[line["uid"], line["sample"]] += 1
                self.trained[line["uid"]] = line["step"]
            case "refund":
                self.refunded[line["uid"]] = line["reason"]
            case "update":
                self.versions.append(line["version"])
                self.digests[line["version"]] = line["digest"]
                self.rewards[line["version"]] = line.get("reward")

    def _go_back(self, line: Line) -> None:
        self.n_terms += 1
        version, is_open = line["version"], set(line["open"])

        def stays(uid: int) -> bool:
            return uid < line["next_uid"] and uid not in is_open

        undone = {uid for uid, step in self.trained.items() if step >= version}
        self._samples = Counter({key: n for key, n in self._samples.items() if key[0] not in undone})
        self.trained = {uid: step for uid, step in self.trained.items() if uid not in undone}
        self.admitted = {uid: row for uid, row in self.admitted.items() if uid < line["next_uid"]}
        self.refunded = {uid: reason for uid, reason in self.refunded.items() if stays(uid)}
        self.versions = [v for v in self.versions if v <= version]
        if line.get("lives_on") and self.versions[-1:] != [version] and version:
            self.versions.append(version)  # the previous head died before that update was reported


def replace(path: Path, text: str) -> None:
    """Atomic: another process may read it at any moment."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has gone, or is another user's
        return b""


def _state(pid: int) -> bytes:
    """R, S, D, T (stopped), Z, ... or nothing when it has gone."""
    return b"".join(_read(pid, "stat").rpartition(b")")[2].split()[:1])


def parent_of(pid: int) -> int:
    """0 for a process that has gone."""
    return int(b"".join(_read(pid, "stat").rpartition(b")")[2].split()[1:2]) or 0)


def _is_zombie(pid: int) -> bool:
    return _state(pid) in (b"Z", b"")


def _open_files(pid: int) -> Iterator[Path]:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            yield Path(os.readlink(f"/proc/{pid}/fd/{number}"))

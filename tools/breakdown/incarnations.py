"""Where the time of processes went: by label and cause, and of a role with those slower than others."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools import run, terminal
from tools.run import Line, Run

TOLERANCE = 0.01  # of the wall time (I12)
TOLERANCE_S = 0.005  # for incarnations of a few milliseconds: writing the lines takes part of them
WAITING = frozenset({"wait", "wait_batch", "idle", "serve"})  # labels of time without work
EVENTS = ("start", "spans", "end", "failed", "completion", "score")


@dataclass(slots=True)
class Incarnation:
    """One incarnation of one actor, from its start line to its last spans line."""

    name: str  # generator-0.1
    began: float  # monotonic
    marked: float  # monotonic: every second until then has a label
    wall_s: float | None = None  # of its end line; None: no end line
    error: str | None = None
    spans: dict[str, float] = field(default_factory=dict)
    causes: dict[str, float] = field(default_factory=dict)  # seconds by LABEL:CAUSE, parts of `spans`
    n_done: int = 0  # a generator's sampled tokens, a reward's scores
    term: int = 0  # the last one that it knew

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]

    @property
    def measured_s(self) -> float:
        """Wall time that the labels must account for."""
        return self.marked - self.began if self.wall_s is None else self.wall_s

    @property
    def labelled_s(self) -> float:
        return sum(self.spans.values())

    @property
    def whole(self) -> bool:
        """Whether the labels sum to the wall time (I12)."""
        return abs(self.labelled_s - self.measured_s) <= max(TOLERANCE * self.measured_s, TOLERANCE_S)

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        return "no end line (running or killed)" if self.wall_s is None else "ended"

    def share(self, label: str) -> float:
        """The label's share of the wall time."""
        return self.spans.get(label, 0.0) / (self.measured_s or self.labelled_s or 1.0)


def read_all(where: Run) -> list[Incarnation]:
    """All incarnations of a run, ordered by role, rank and incarnation."""
    return [actor for path in where.journals() for actor in read_incarnations(path)]


def read_incarnations(path: Path) -> list[Incarnation]:
    """The incarnations in one journal file; every start line begins another one. Raises ConfigError on its schema."""
    found: list[Incarnation] = []
    for line in run.lines(path, *EVENTS):
        if line["event"] == "start" or not found:
            run.check_schema(line, path)
            name = f"{line['role']}-{line['rank']}.{line['inc']}"
            found.append(Incarnation(name, began=line["t"], marked=line["t"]))
        add_line(found[-1], line)
    return found


def add_line(actor: Incarnation, line: Line) -> None:
    if line["event"] == "spans":
        actor.marked = line["t"]
        actor.term = max(actor.term, line.get("term", 0))
        add_seconds(actor.spans, line, "s_")
        add_seconds(actor.causes, line, "w_")
    elif line["event"] == "end":
        actor.wall_s = float(line["wall_s"])
    elif line["event"] == "failed" and "name" not in line:  # with a name, the head reports another actor
        actor.error = str(line.get("error", ""))
    elif line["event"] == "completion":
        actor.n_done += int(line["n_tokens"])
    elif line["event"] == "score":
        actor.n_done += 1


def add_seconds(totals: dict[str, float], line: Line, prefix: str) -> None:
    """Add the fields of a spans line that begin with `prefix`."""
    for key, seconds in line.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            totals[name] = totals.get(name, 0.0) + seconds


def by_role(found: Iterable[Incarnation]) -> dict[str, list[Incarnation]]:
    roles: dict[str, list[Incarnation]] = {}
    for actor in found:
        if actor.spans:
            roles.setdefault(actor.role, []).append(actor)
    return roles


SLOW = 0.8  # a straggler works at less than this share of the median rate of its role
LONG = 0.25  # processes with less than this share of the longest wall time are not compared
N_SHOWN = 5  # stragglers
WORK = {"generator": ("generate", "tokens"), "reward": ("score", "scores")}  # role -> label of its work, unit


@dataclass(frozen=True, slots=True)
class LabelShare:
    """One label over all processes of a role."""

    role: str
    label: str
    seconds: float  # sum over the processes
    share: float  # of the wall time of all processes together
    lowest: float
    lowest_name: str
    highest: float
    highest_name: str


@dataclass(frozen=True, slots=True)
class Straggler:
    """A process that is slower than the others of its role."""

    name: str
    what: str  # of the rates
    rate: float
    median: float

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.rate:.4g} {self.what}, the median is {self.median:.4g}"


def label_shares(found: Iterable[Incarnation]) -> list[LabelShare]:
    """The labels of every role, most time first."""
    out = []
    for role, actors in by_role(found).items():
        wall_s = sum(actor.measured_s for actor in actors) or 1.0
        shares = []
        for label in {label for actor in actors for label in actor.spans}:
            seconds = sum(actor.spans.get(label, 0.0) for actor in actors)
            ordered = sorted(actors, key=partial(_share, label))
            low, high = ordered[0], ordered[-1]
            lows, highs = (low.share(label), low.name), (high.share(label), high.name)
            shares.append(LabelShare(role, label, seconds, seconds / wall_s, *lows, *highs))
        out += sorted(shares, key=lambda one: (-one.seconds, one.label))
    return out


def _share(label: str, actor: Incarnation) -> float:
    return actor.share(label)


def stragglers(found: Iterable[Incarnation]) -> list[Straggler]:
    """Processes at less than 80 % of the median rate of their role, slowest first.

    A generator's rate is tokens per second of `generate`, a reward's scores per second of `score`. Learners
    work in lockstep: there a straggler is a rank whose seconds of work exceed the median's by as much. Those before and
    after a restart or a change of the split are not compared.
    """
    out = []
    for role, actors in compared_groups(found):
        longest = max(actor.measured_s for actor in actors)
        compared = [actor for actor in actors if actor.measured_s >= LONG * longest and _work_s(actor) > 0]
        if role == "head" or len(compared) < 2:
            continue
        rates = {a.name: (a.n_done if a.role in WORK else 1) / _work_s(a) for a in compared}
        median = statistics.median(rates.values())
        what = f"{WORK[role][1]} per second of {WORK[role][0]}" if role in WORK else "runs per second of its work"
        out += [Straggler(name, what, rate, median) for name, rate in rates.items() if rate < SLOW * median]
    return sorted(out, key=lambda one: one.rate / one.median)


def compared_groups(found: Iterable[Incarnation]) -> list[tuple[str, list[Incarnation]]]:
    """(role, processes that are compared): those of a role, learners by their last term."""
    groups: dict[tuple[str, int], list[Incarnation]] = {}
    for role, actors in by_role(found).items():
        for actor in actors:
            groups.setdefault((role, actor.term if role == "learner" else 0), []).append(actor)
    return [(role, actors) for (role, _), actors in groups.items()]


def _work_s(actor: Incarnation) -> float:
    if actor.role in WORK:
        return actor.spans.get(WORK[actor.role][0], 0.0)
    return sum(seconds for label, seconds in actor.spans.items() if label not in WAITING)


def role_lines(found: Sequence[Incarnation]) -> list[str]:
    shares = label_shares(found)
    if not shares:
        return ["no labelled second yet"]
    rows: list[tuple[str, ...]] = [("role", "label", "seconds", "share", "lowest", "highest", "")]
    roles = by_role(found)
    for one in shares:
        n = len(roles[one.role])
        low = f"{one.lowest:.1%} {one.lowest_name}" if n > 1 else ""
        high = f"{one.highest:.1%} {one.highest_name}" if n > 1 else ""
        role = f"{one.role} x {n}" if n > 1 else one.role
        rows.append((role, one.label, f"{one.seconds:.2f}", f"{one.share:.1%}", low, high, terminal.bar(one.share, 20)))
    return terminal.columns(rows, right=frozenset({2, 3}))


def straggler_lines(found: Sequence[Incarnation]) -> list[str]:
    slow = stragglers(found)
    if not slow:
        return [f"none: every process works at {SLOW:.0%} of the median rate of its role or more"]
    more = [f"and {len(slow) - N_SHOWN} more (--json lists all)"] if len(slow) > N_SHOWN else []
    return [one.sentence for one in slow[:N_SHOWN]] + more

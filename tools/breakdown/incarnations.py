"""One process of a run: its wall time, its seconds by label and by cause of waiting, and its work."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tools import run
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
    """Add one journal line to its incarnation."""
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
    """The incarnations that have a labelled second, by role."""
    roles: dict[str, list[Incarnation]] = {}
    for actor in found:
        if actor.spans:
            roles.setdefault(actor.role, []).append(actor)
    return roles

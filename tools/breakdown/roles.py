"""Time by role: the share of each label over the processes of a role, and the processes that are slower than others."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from tools import terminal
from tools.breakdown.incarnations import WAITING, Incarnation, by_role

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
        rates = {actor.name: _rate(actor) for actor in compared}
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


def _rate(actor: Incarnation) -> float:
    return (actor.n_done if actor.role in WORK else 1) / _work_s(actor)


def role_lines(found: Sequence[Incarnation]) -> list[str]:
    """The table by role, as lines."""
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
    """The slowest stragglers, as lines."""
    slow = stragglers(found)
    if not slow:
        return [f"none: every process works at {SLOW:.0%} of the median rate of its role or more"]
    more = [f"and {len(slow) - N_SHOWN} more (--json lists all)"] if len(slow) > N_SHOWN else []
    return [one.sentence for one in slow[:N_SHOWN]] + more

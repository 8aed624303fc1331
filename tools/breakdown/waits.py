"""Waits by cause, and the cost of pushes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tools import run, terminal
from tools.breakdown.incarnations import Incarnation, by_role
from tools.breakdown.steps import Step, values
from tools.run import Run

MEANING = {
    "sampling": "groups of the next batch are not sampled",
    "reward": "its last group is sampled and not scored",
    "push": "the gate is shut until a version is published",
    "prompt": "the gate is shut: an update or its push must end first",
    "weights": "no valid weights yet",
    "episode": "all live episodes wait for a tool or an agent",
}


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds that a role waited for one cause."""

    role: str
    cause: str
    seconds: float
    share: float  # of the wall time of the role


@dataclass(slots=True)
class PushCost:
    """What the pushes cost the processes that take part."""

    n: int  # complete
    published_s: float  # sum over pushes: from begin to publish
    receive_s: float = 0.0  # sum over generators, beside decoding
    stall_s: float = 0.0  # sum over generators: decoding pause
    stall_share: float = 0.0  # of the generators' wall time
    snapshot_s: float = 0.0  # of the learners
    snapshot_share: float = 0.0
    sent_bytes: int = 0  # by the root to each member, sum over its pushes, catch-up pushes included
    n_sent: int = 0  # of these pushes, those that sent bytes
    n_deltas: int = 0  # of these, those that sent only what changed

    @property
    def sent(self) -> str:
        """Mean size of a push that sent bytes."""
        return f"{self.sent_bytes / self.n_sent / 1e6:.3g} MB"

    @property
    def forms(self) -> str:
        return f"to each member, mean of {self.n_sent} pushes; {self.n_deltas} sent only what changed"


def waits(found: Sequence[Incarnation], steps: Sequence[Step]) -> list[Wait]:
    """The waits of learners (by the head's lines) and generators (their own), longest first in each role."""
    roles = by_role(found)
    out = []
    learner_s = _longest(roles.get("learner", []))
    for cause in ("sampling", "reward", "push"):
        seconds = sum(values(steps, f"wait_{cause}_s"))
        if learner_s:
            out.append(Wait("learner", cause, seconds, seconds / learner_s))
    generators = roles.get("generator", [])
    wall_s = sum(actor.measured_s for actor in generators)
    causes: dict[str, float] = {}
    for actor in generators:
        for name, seconds in actor.causes.items():
            label, _, cause = name.partition(":")
            if label == "idle":
                causes[cause] = causes.get(cause, 0.0) + seconds
    rest = sum(actor.spans.get("idle", 0.0) for actor in generators) - sum(causes.values())
    if rest > 0.01 * wall_s:
        causes["not recorded"] = rest
    out += [Wait("generator", cause, s, s / (wall_s or 1.0)) for cause, s in causes.items()]
    return sorted(out, key=lambda one: (one.role != "learner", -one.seconds))


def _longest(actors: Sequence[Incarnation]) -> float:
    """Wall time of the role: ranks run side by side, incarnations of a rank one after the other."""
    ranks: dict[str, float] = {}
    for actor in actors:
        rank = actor.name.partition(".")[0]
        ranks[rank] = ranks.get(rank, 0.0) + actor.measured_s
    return max(ranks.values(), default=0.0)


def push_cost(where: Run, found: Sequence[Incarnation], steps: Sequence[Step]) -> PushCost:
    published = values(steps, "pushed_s")
    cost = PushCost(len(published), sum(published))
    for path in where.journals("generator"):
        for line in run.lines(path, "pushed"):
            cost.receive_s += line["receive_s"]
            cost.stall_s += line["stall_s"]
    for path in where.journals("learner"):
        for line in run.lines(path, "pushed"):  # none but the root's
            cost.sent_bytes += line.get("sent_bytes", 0)
            cost.n_sent += line.get("sent_bytes", 0) > 0
            cost.n_deltas += "delta_from" in line
    roles = by_role(found)
    wall_s = sum(actor.measured_s for actor in roles.get("generator", []))
    cost.stall_share = cost.stall_s / wall_s if wall_s else 0.0
    learners = roles.get("learner", [])
    cost.snapshot_s = sum(actor.spans.get("snapshot", 0.0) for actor in learners)
    learner_s = sum(actor.measured_s for actor in learners)
    cost.snapshot_share = cost.snapshot_s / learner_s if learner_s else 0.0
    return cost


def wait_lines(found: Sequence[Wait]) -> list[str]:
    if not found:
        return ["none recorded"]
    rows = [
        (one.role, one.cause, f"{one.seconds:.2f} s", f"{one.share:.1%}", MEANING.get(one.cause, "")) for one in found
    ]
    return terminal.columns(rows, right=frozenset({2, 3}))


def push_lines(cost: PushCost) -> list[str]:
    if not cost.n:
        return ["none published"]
    rows = [
        ("begin to publish", f"{cost.published_s / cost.n:.3f} s", "mean of a push; the next update runs meanwhile"),
        ("receive", f"{cost.receive_s:.2f} s", "all generators, beside decoding"),
        ("swap", f"{cost.stall_s:.2f} s", f"all generators, {cost.stall_share:.1%} of their time: decoding stands"),
        ("snapshot", f"{cost.snapshot_s:.2f} s", f"all learners, {cost.snapshot_share:.1%} of their time"),
    ]
    if cost.n_sent:
        rows.append(("sent", cost.sent, cost.forms))
    return [f"{cost.n} published", *terminal.columns(rows, right=frozenset({1}))]


def as_json(found: Sequence[Wait]) -> list[dict[str, object]]:
    """The waits as plain objects."""
    return [asdict(one) for one in found]

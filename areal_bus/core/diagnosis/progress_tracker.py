"""Tracks when each part of the ring last made progress, by sampling the head's state about once a second.

A lost lease, a broken push or a change of a member's state is not progress.
"""

from collections.abc import Hashable, Mapping, Sequence

from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.state import HeadState
from areal_bus.messages import Role

GAP_S = 30.0  # looks further apart than this: the head itself stood still, and nobody waited meanwhile


class Since:
    """Values by key, and since when each is what it is."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[object, float]] = {}

    def update(self, values: Mapping[str, object] | Mapping[int, object], t: float) -> bool:
        """All values now. Returns whether one came or changed."""
        before: dict[Hashable, tuple[object, float]] = self._known
        now: dict[Hashable, tuple[object, float]] = {}
        moved = False
        for key, value in values.items():
            known = before.get(key)
            if known is None or known[0] != value:
                known = (value, t)
                moved = True
            now[key] = known
        self._known = now
        return moved

    def of(self, key: Hashable, t: float) -> float:
        """Since when; `t` itself for what is not known."""
        return self._known[key][1] if key in self._known else t


class ProgressTracker:
    """When each thing moved last, to the precision of the looks."""

    def __init__(self, *, quiet_s: float, still_s: float) -> None:
        """`quiet_s`: a member not heard for longer is silent. `still_s`: one at work without progress is stuck."""
        self.quiet_s = quiet_s
        self.still_s = still_s
        self.t = 0.0  # seconds of all looks, without gaps between them
        self.moved = 0.0  # when the ring moved last
        self._last: float | None = None  # the last look by the head's clock
        self.ring, self.progress, self.prompts = Since(), Since(), Since()  # what moves when the ring does
        self.leases, self.notes, self.standings = Since(), Since(), Since()

    def look(self, state: HeadState, now: float) -> None:
        """Remember what moved since the last look."""
        gap_s = 0.0 if self._last is None else now - self._last
        self._last = now
        self.t += gap_s if gap_s <= GAP_S else 0.0
        members, live = state.members.by_name.values(), state.ledger.live()
        moved = [
            self.ring.update(_ring(state), self.t),
            self.progress.update({x.name: (x.progress, x.ready) for x in members}, self.t),
            self.prompts.update({x.uid: (len(x.sampled), len(x.scored) + len(x.failed)) for x in live}, self.t),
        ]
        if any(moved):
            self.moved = self.t
        self.leases.update({x.uid: (x.attempt, x.holder) for x in live}, self.t)
        self.notes.update({x.name: x.note for x in members}, self.t)
        self.standings.update({x.name: x.standing for x in members}, self.t)

    @property
    def stalled_s(self) -> float:
        """How long nothing has moved."""
        return self.t - self.moved

    def age(self, table: Since, key: Hashable) -> float:
        """How long a value has been what it is."""
        return self.t - table.of(key, self.t)

    @staticmethod
    def _allowance(state: HeadState, member: Member, now: float) -> float:
        """How much longer than on an idle machine it may be silent."""
        return state.members.limit_s(member, now) - state.members.patience.least_s

    def stuck_s(self, state: HeadState, member: Member) -> float | None:
        """How long a member at work has made no progress; None when it does, or has no work."""
        still_s = self.age(self.progress, member.name)
        return still_s if still_s > self.still_s and _is_at_work(state, member) else None

    def suspects(self, state: HeadState, now: float, awaited: Sequence[str]) -> dict[str, str]:
        """Members that are dead, silent or stuck, with what is wrong; those awaited come first."""
        found: dict[str, str] = {}
        for name in dict.fromkeys((*awaited, *state.members.by_name)):
            member = state.members.by_name.get(name)
            wrong = "" if member is None else self._wrong(state, member, now, is_awaited=name in awaited)
            if wrong:
                found[name] = f"{place(name)} {wrong}"
        return found

    def _wrong(self, state: HeadState, member: Member, now: float, *, is_awaited: bool) -> str:
        silent_s = now - member.heard
        if member.standing is MemberState.DEAD:  # its work is with others: only who waits for it cares
            return f"dead, silent for {silent_s:.0f} s" if is_awaited else ""
        if silent_s > self.quiet_s and silent_s > self.quiet_s + self._allowance(state, member, now):
            return f"silent for {silent_s:.0f} s"
        stuck_s = self.stuck_s(state, member)
        if stuck_s is not None:
            return f"stands still for {stuck_s:.0f} s" + (f" ({member.note})" if member.note else "")
        return ""


def place(name: str) -> str:
    """The name without its incarnation: generator-1 of generator-1.0."""
    return name.rpartition(".")[0] or name


def _ring(state: HeadState) -> dict[str, object]:
    """Counts that move when the ring does. A lost lease, a push or a change of standing alone is no move."""
    gate, ledger, evaluation = state.gate, state.ledger, state.evaluations.open
    return {
        "phase": state.phase,
        "u": gate.u,
        "v": gate.v,
        "w": gate.w,
        "asked": tuple(sorted(state.terms.requests)),
        "admitted": ledger.next_uid,
        "refunded": ledger.refunds.total(),
        "finished": tuple(state.terms.finished),
        "evaluation": None if evaluation is None else evaluation.name,
        "evaluated": 0 if evaluation is None else len(evaluation.scored) + len(evaluation.failed),
    }


def _is_at_work(state: HeadState, member: Member) -> bool:
    """Whether its progress counter should increase. The head knows its work; a reward reports it in its heartbeat."""
    if member.standing is MemberState.DEAD:
        return False
    if member.role is Role.LEARNER:
        return state.gate.w > state.gate.u
    if member.role is Role.REWARD:
        return bool(member.note) and not member.note.startswith("waits")
    return member.load > 0 and member.version is not None

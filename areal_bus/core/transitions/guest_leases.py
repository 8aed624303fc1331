"""Leases of guests time out; the limit grows with what the job's own generators need. Pure: no I/O."""

from areal_bus.core.parts.ledger import PromptState
from areal_bus.core.state import HeadState
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.messages import Refund, Role

TIMED_OUT = "timed out: the guest sent no complete result"


class GuestLeases:
    """Ends leases through `Rollouts`."""

    def __init__(self, state: HeadState, rollouts: Rollouts) -> None:
        self.state, self.rollouts = state, rollouts

    def expire(self) -> None:
        """At every tick: a lease that a guest holds for too long has failed there, and its prompt goes to others."""
        state, now = self.state, self.state.now
        guests = {x.name for x in state.members.of(Role.GENERATOR) if state.is_guest(x)}
        if not guests:
            return
        held = [(x, x.holder) for x in state.ledger.live() if x.holder is not None and x.state is not PromptState.READY]
        evaluation = state.evaluations.open
        problems = list(evaluation.leased.items()) if evaluation is not None else []
        began = [(holder, entry.leased_at) for entry, holder in held]
        began += [(holder, evaluation.leased_at[uid]) for uid, holder in problems if evaluation is not None]
        limit_s = state.lease_limit.seconds(now - at for holder, at in began if holder not in guests)
        why = f"{TIMED_OUT} within {limit_s:.0f} s"
        for entry, holder in held:
            if holder in guests and now - entry.leased_at > limit_s:
                self.rollouts.failed(entry, Refund.SAMPLING_ERROR, why, lasted_s=limit_s)
        for uid, holder in problems:
            if evaluation is not None and holder in guests and now - evaluation.leased_at[uid] > limit_s:
                attempt = evaluation.attempts[uid]
                self.rollouts.problem_failed(evaluation, uid, attempt, why, lasted_s=limit_s)
                self.rollouts.end_lease(holder, uid, attempt, evaluation.name)

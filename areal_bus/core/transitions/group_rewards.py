"""Group rewards (`reward.group`): a reward actor scores each complete group once; a failed score refunds it."""

import json

from areal_bus import messages as m
from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.members.membership import Member, MemberState
from areal_bus.core.parts.ledger import LedgerEntry
from areal_bus.core.state import HeadState
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.messages import MAX_TEXT_BYTES, Refund, Role, VerdictStatus


class GroupRewards:
    """Asks rewards to compare the samples of groups, and applies their verdicts to the ledger."""

    def __init__(self, state: HeadState, effects: Effects, rollouts: Rollouts) -> None:
        self.state, self.effects, self.rollouts = state, effects, rollouts
        self.ledger, self.members, self.rows = state.ledger, state.members, state.rows

    def ask(self) -> None:
        """Send waiting groups, the oldest first, to the rewards with the fewest: at most one a worker (I9)."""
        while len(self.ledger.uncompared) and (reward := self._least_loaded()) is not None:
            entry = self.ledger.ask(reward.name)
            group = self._message(entry)
            n_bytes = sum(len(text.encode(errors="replace")) for text in (group.prompt_text, group.row, group.samples))
            if n_bytes > MAX_TEXT_BYTES:
                why = f"a group has at most {MAX_TEXT_BYTES} bytes of text for reward.group; this one has {n_bytes}"
                self.rollouts.refund(entry, Refund.REWARD_ERROR, why)
                continue
            self.effects.record(Event.COMPARE, uid=entry.uid, attempt=entry.attempt, reward_actor=reward.name)
            self.effects.send(reward.name, group)

    def _least_loaded(self) -> Member | None:
        n_asked = self.ledger.n_asked
        free = [x for x in self.members.of(Role.REWARD, MemberState.HEALTHY) if n_asked[x.name] < x.capacity]
        return min(free, key=lambda member: (n_asked[member.name], member.index), default=None)

    def _message(self, entry: LedgerEntry) -> m.Group:
        samples = [
            {"sample": sample, "completion": scored.text, "reward": scored.reward, "correct": scored.correct}
            for sample, scored in sorted(entry.scored.items())
        ]
        prompt_text = next(iter(entry.scored.values())).prompt_text
        row = self.rows.of(entry.uid).drawn.text
        return m.Group(entry.uid, entry.attempt, prompt_text, row, json.dumps(samples, ensure_ascii=False))

    def scored(self, member: Member, message: m.GroupScored) -> None:
        """The verdict of a group: it is ready, or refunded. Raises ImpossibleEvent or LateEvent if it cannot count."""
        entry = self.ledger.awaits_comparison(member.name, message.uid, message.attempt)
        status, error, n = message.status, message.error, len(entry.scored)
        if status == VerdictStatus.VALUE and len(message.rewards) != n:
            status = VerdictStatus.ERROR
            error = f"reward.group gives a reward to each of {n} samples: {member.name} sent {len(message.rewards)}"
        is_value = status == VerdictStatus.VALUE
        self.effects.record(
            Event.COMPARED,
            uid=entry.uid,
            attempt=entry.attempt,
            reward_actor=member.name,
            status=str(status),
            **({"rewards": list(message.rewards)} if is_value else {"error": error[:500]}),
        )
        if is_value:
            self.ledger.compared(member.name, entry.uid, entry.attempt, message.rewards)
            self.rollouts.ready(entry)
        else:
            timed_out = status == VerdictStatus.TIMEOUT
            self.rollouts.refund(entry, Refund.REWARD_TIMEOUT if timed_out else Refund.REWARD_ERROR, error)

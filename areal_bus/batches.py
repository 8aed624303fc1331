"""Which groups are the next batch and how it is handed out; knows no generator, lease or weights.

A batch is the B oldest complete groups (I8), when the policy lets them go (I2): `hold` waits for others first, `drop`
refunds those that are too old by now.
"""

from dataclasses import dataclass
from typing import Any

from areal_bus import messages as m
from areal_bus.effects import Effects
from areal_bus.errors import ImpossibleEvent
from areal_bus.gate import Gate
from areal_bus.journal import Event
from areal_bus.ledger import Entry, Ledger
from areal_bus.membership import Member
from areal_bus.messages import Scored
from areal_bus.rules import HeadRules
from areal_bus.sharding import item, split
from areal_bus.staleness import runs_under
from areal_bus.supply import Supply


@dataclass(frozen=True, slots=True)
class Batch:
    """What was taken: groups, in the order in which they are numbered for the learners."""

    step: int
    clock: int
    entries: list[Entry]


class Batches:
    """Chooses and hands out; the gate's clock and the ledger's states move with it."""

    def __init__(self, rules: HeadRules, gate: Gate, ledger: Ledger, supply: Supply, effects: Effects) -> None:
        self.rules = rules
        self.gate = gate
        self.ledger = ledger
        self.supply = supply
        self.effects = effects

    def too_old(self) -> Entry | None:
        """The oldest complete group, if it may be trained no more (policy `drop`)."""
        entry = self.ledger.ready.first()
        return entry if entry is not None and self.gate.is_too_old(entry.born) else None

    @property
    def is_at_the_end(self) -> bool:
        """No row will come, and all that lives is complete."""
        return self.supply.is_exhausted and len(self.ledger.ready) == self.ledger.n_live

    def n_next(self) -> int:
        """Groups of the batch that can be taken now: B, fewer at the end of the data, 0 for none yet."""
        ready, size = self.ledger.ready, self.rules.batch_size
        n_groups = size if len(ready) >= size else len(ready) if self.is_at_the_end else 0
        return n_groups if n_groups and self.gate.may_take(n_groups, ready.born) else 0

    def take(self, n_groups: int) -> Batch:
        """The oldest complete groups are in training, and the journal has them."""
        step = self.gate.w
        entries = self.ledger.take(n_groups, step)
        clock = self.gate.take([entry.born for entry in entries])
        self.effects.record(
            Event.BATCH,
            step=step,
            clock=clock,
            n_groups=len(entries),
            n_trajectories=sum(len(entry.scored) for entry in entries),
            short=n_groups < self.rules.batch_size,
            u=self.gate.u,
            v=self.gate.v,
            **_left_out(entries),
        )
        for entry in entries:
            self.supply.close(entry.uid)
            for _, scored in sorted(entry.scored.items()):
                self._record_trajectory(scored, step, clock, entry.born)
        return Batch(step, clock, entries)

    def hand_out(self, batch: Batch, learners: list[Member]) -> None:
        """Every learner rank gets its share."""
        weights = [sum(scored.n_sampled for scored in entry.scored.values()) for entry in batch.entries]
        for learner, share in zip(learners, split(weights, len(learners)), strict=True):
            self._send_share(learner, share, batch)

    def _send_share(self, learner: Member, share: list[int], batch: Batch) -> None:
        step, clock, entries = batch.step, batch.clock, batch.entries
        n_items = 0
        for group in share:
            for _, scored in sorted(entries[group].scored.items()):
                shard = item(scored, step=step, clock=clock, group=group, n_groups=len(entries))
                self.effects.send(learner.name, shard)
                n_items += 1
        last = step + 1 >= self.rules.total_steps
        self.effects.send(learner.name, m.ShardEnd(step, clock, n_items, len(entries), last))

    def _record_trajectory(self, scored: Scored, step: int, clock: int, born: int) -> None:
        runs = runs_under(self.rules.policy, scored.spans, clock, self.rules.eta)  # I2
        n_masked = sum(n for n, trained in runs if not trained)
        self.effects.record(
            Event.TRAJECTORY,
            step=step,
            clock=clock,
            born=born,
            **ids(scored),
            reward=scored.reward,
            n_tokens=scored.n_sampled,
            n_masked=n_masked,
            versions=[number for span in scored.spans for number in span],
            finish=scored.finish,
        )
        self.effects.keep(scored, step=step, clock=clock, n_masked=n_masked)


def _left_out(entries: list[Entry]) -> dict[str, Any]:
    """Fields that name the samples that their groups are trained without (I8), and count their tokens (I12)."""
    failed = [scored for entry in entries for _, scored in sorted(entry.failed.items())]
    if not failed:
        return {}
    missing = [number for scored in failed for number in (scored.uid, scored.sample)]
    return {"missing": missing, "n_tokens_dropped": sum(scored.n_sampled for scored in failed)}


def ids(message: m.Sampled | Scored) -> dict[str, Any]:
    """What a journal line names a sample by."""
    found = {"uid": message.uid, "sample": message.sample, "attempt": message.attempt}
    return {**found, "evaluation": message.evaluation} if message.evaluation else found


def check_spans(scored: Scored | m.Partial, *, born: int, clock: int) -> None:
    """Versions that a generator can have stamped, over exactly the sampled tokens (I5, I6): born <= version <= u."""
    n_tokens, before = 0, born
    for version, n in scored.spans:
        if n < 1 or not before <= version <= clock:
            raise ImpossibleEvent(
                f"versions never decrease along a trajectory, from born {born} to the clock {clock}, each over one "
                f"token or more; got {scored.spans}"
            )
        before = version
        n_tokens += n
    if n_tokens != scored.n_sampled or len(scored.logps) != 4 * n_tokens:
        raise ImpossibleEvent(f"spans, log-probs and segments cover the same tokens; got {n_tokens}, "
                              f"{len(scored.logps) // 4} and {scored.n_sampled}")  # fmt: skip

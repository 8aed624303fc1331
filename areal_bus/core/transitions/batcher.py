"""Forms batches of the B oldest complete groups (I8), as the staleness policy permits (I2), and shards them."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_bus import messages as m
from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.members.membership import Member
from areal_bus.core.parts.ledger import LedgerEntry
from areal_bus.core.parts.reward_parts import mean_fields, role_fields
from areal_bus.core.parts.staleness import runs_under
from areal_bus.core.rows import Row
from areal_bus.core.state import HeadState
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Scored, ShardItem, recast

EVEN = 1  # tokens by which shares may differ when nothing is exchanged any more
EXCHANGES = 4  # at most, a share: each evens out the two that differ most


def split(weights: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Split the indices of `weights` over ranks with balanced sums: greedy, then exchanges; each shard ascending."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]  # longest first
    heap = list(range(n_ranks))  # tokens * n_ranks + rank: a number is compared faster than a pair
    for index in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        lightest = heap[0]
        shares[lightest % n_ranks].append(index)
        heapq.heapreplace(heap, lightest + weights[index] * n_ranks)
    even_out(shares, weights)
    return [sorted(share) for share in shares]


def even_out(shares: list[list[int]], weights: Sequence[int]) -> None:
    """Exchange items of the heaviest and lightest shard, in place, while that helps; shards stay sorted by weight."""
    tokens = [sum([weights[i] for i in share]) for share in shares]  # noqa: C419  a list is faster
    for _ in range(EXCHANGES * len(shares)):
        heavy = max(range(len(shares)), key=tokens.__getitem__)
        light = min(range(len(shares)), key=tokens.__getitem__)
        apart = tokens[heavy] - tokens[light]
        if apart <= EVEN:
            return
        pair = _closest_pair([weights[i] for i in shares[heavy]], [weights[i] for i in shares[light]], apart / 2)
        if pair is None:
            return
        mine, its = pair
        given = shares[heavy].pop(mine)
        taken = shares[light][its : its + 1]  # none: the item just moves
        shares[light][its : its + 1] = [given]
        shares[heavy] += taken
        for share in (shares[heavy], shares[light]):
            share.sort(key=weights.__getitem__, reverse=True)
        moved = weights[given] - sum(weights[i] for i in taken)
        tokens[heavy] -= moved
        tokens[light] += moved


def _closest_pair(heavy: Sequence[int], light: Sequence[int], wish: float) -> tuple[int, int] | None:
    """Indices of the items whose exchange is closest to `wish`; len(light): nothing in exchange; None: none helps."""
    found, off = None, wish
    i = j = 0
    while i < len(heavy) and j <= len(light):
        difference = heavy[i] - (light[j] if j < len(light) else 0)
        if abs(difference - wish) < off:
            found, off = (i, j), abs(difference - wish)
        if difference > wish:
            i += 1
        else:
            j += 1
    return found


def item(scored: Scored, *, step: int, clock: int, group: int, n_groups: int, born: int, source: str = "") -> ShardItem:
    """The message with which a learner rank receives a scored trajectory; `born` and `source` are its prompt's."""
    place = {"step": step, "clock": clock, "group": group, "n_groups": n_groups, "born": born, "source": source}
    return recast(scored, ShardItem, **place, rewards=role_fields(scored).get("rewards", []))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A batch that was taken. The index of a group here is its index at the learners."""

    step: int
    clock: int
    entries: list[LedgerEntry]


class Batcher:
    """Chooses batches and sends their shards. Moves the gate's clock and the ledger's states."""

    def __init__(self, state: HeadState, effects: Effects) -> None:
        self.state, self.effects = state, effects
        self.rules, self.gate, self.ledger, self.rows = state.rules, state.gate, state.ledger, state.rows

    def too_old(self) -> LedgerEntry | None:
        """The oldest complete group, if it is too old to be trained (policy `drop`)."""
        entry = self.ledger.ready.first()
        return entry if entry is not None and self.gate.is_too_old(entry.born) else None

    @property
    def is_at_the_end(self) -> bool:
        """The data has ended, and all live prompts are complete."""
        return self.rows.is_exhausted and len(self.ledger.ready) == self.ledger.n_live

    def n_next(self) -> int:
        """Groups of the batch that can be taken now: B, fewer at the end of the data, 0 for none yet."""
        ready, size = self.ledger.ready, self.rules.batch_size
        n_groups = size if len(ready) >= size else len(ready) if self.is_at_the_end else 0
        return n_groups if n_groups and self.gate.may_take(n_groups, ready.born) else 0

    def take(self, n_groups: int) -> BatchPlan:
        """Move the oldest complete groups into training and journal them."""
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
            **mean_fields(scored for entry in entries for scored in entry.scored.values()),
        )
        for entry in entries:
            self.rows.learn(entry.uid, *entry.solved)
            drawn = self.rows.of(entry.uid).drawn
            for _, scored in sorted(entry.scored.items()):
                self._record_trajectory(scored, step, clock, entry.born, drawn)
        return BatchPlan(step, clock, entries)

    def hand_out(self, batch: BatchPlan, learners: list[Member]) -> None:
        """Send each learner rank its shard; the ranks of a context group, next to each other, get the same one."""
        weights = [sum(scored.n_sampled for scored in entry.scored.values()) for entry in batch.entries]
        width = self.rules.context_parallel
        shares = split(weights, len(learners) // width)
        for learner in learners:
            self._send_share(learner, shares[learner.index // width], batch)

    def _send_share(self, learner: Member, share: list[int], batch: BatchPlan) -> None:
        step, clock, entries = batch.step, batch.clock, batch.entries
        n_items = 0
        for group in share:
            entry = entries[group]
            for _, scored in sorted(entry.scored.items()):
                place = {"step": step, "clock": clock, "group": group, "n_groups": len(entries)}
                shard = item(scored, **place, born=entry.born, source=entry.source)
                self.effects.send(learner.name, shard)
                n_items += 1
        last = step + 1 >= self.rules.total_steps
        self.effects.send(learner.name, m.ShardEnd(step, clock, n_items, len(entries), last))

    def _record_trajectory(self, scored: Scored, step: int, clock: int, born: int, drawn: Row) -> None:
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
            **role_fields(scored),
        )
        self.effects.keep(scored, step=step, clock=clock, n_masked=n_masked, source=drawn.source, row=drawn.text)


def _left_out(entries: list[LedgerEntry]) -> dict[str, Any]:
    """Journal fields: the failed samples that are left out of their groups (I8), and their tokens (I12)."""
    failed = [scored for entry in entries for _, scored in sorted(entry.failed.items())]
    if not failed:
        return {}
    missing = [number for scored in failed for number in (scored.uid, scored.sample)]
    return {"missing": missing, "n_tokens_dropped": sum(scored.n_sampled for scored in failed)}


def ids(message: m.Sampled | Scored) -> dict[str, Any]:
    """The journal fields that identify a sample."""
    found = {"uid": message.uid, "sample": message.sample, "attempt": message.attempt}
    return {**found, "evaluation": message.evaluation} if message.evaluation else found


def check_spans(scored: Scored | m.Partial, *, born: int, clock: int) -> None:
    """Check that the spans cover exactly the sampled tokens, in order, with born <= version <= u (I5, I6)."""
    n_tokens, before = 0, born
    for version, n in scored.spans:
        if n < 1 or not before <= version <= clock:
            rule = f"versions never decrease along a trajectory, from born {born} to the clock {clock}"
            raise ImpossibleEvent(f"{rule}, each over one token or more; got {scored.spans}")
        before = version
        n_tokens += n
    if n_tokens != scored.n_sampled or len(scored.logps) != 4 * n_tokens:
        got = f"{n_tokens}, {len(scored.logps) // 4} and {scored.n_sampled}"
        raise ImpossibleEvent(f"spans, log-probs and segments cover the same tokens; got {got}")


class Refill:
    """Decides which complete group is replaced next. Its count restarts with each batch and each term."""

    def __init__(self, state: HeadState) -> None:
        self._rules, self._ledger, self._rows = state.rules, state.ledger, state.rows
        self._n_replaced = 0

    def restart(self) -> None:
        """A batch was taken, or a term begins."""
        self._n_replaced = 0

    def next(self) -> LedgerEntry | None:
        """The oldest complete group without signal that the caller may refund now (eta = 0: once all are complete)."""
        if self._n_replaced >= self._rules.max_refill or not len(self._ledger.flat) or self._rows.is_exhausted:
            return None
        if self._rules.eta == 0 and self._ledger.n_live != len(self._ledger.ready):
            return None
        self._n_replaced += 1
        return self._ledger.flat.first()

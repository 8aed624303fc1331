"""Rules that look right and are not: each is first seen to fail, then ours holds in the same story."""

from collections.abc import Callable, Mapping, Sequence

from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.staleness import StalenessPolicy, runs_under

HOLD = StalenessPolicy.HOLD


def train(gate: Gate, *borns: int, publish: bool = True) -> int:
    """Take a batch of prompts born at these versions, update and publish. Returns its largest c - born."""
    clock = gate.take(borns)
    gate.finish_update(gate.u + 1)
    if publish:
        gate.publish(gate.u)
    return clock - min(borns)


# 1: the paper's gate, eq. 3


def test_overtaking_under_the_papers_gate_trains_beyond_eta() -> None:
    """B = 1, eta = 1: a and b are admitted at version 0; b, then c, then a train, and a is two versions old."""
    paper = Gate(batch_size=1, eta=1, policy=StalenessPolicy.PAPER)
    paper.admit(0)  # a, slow
    paper.admit(0)  # b
    train(paper, 0)  # b
    paper.admit(1)  # c: eq. 3 lets it in
    train(paper, 1)  # c
    assert train(paper, 0) == 2  # a

    hold = Gate(batch_size=1, eta=1, policy=HOLD)
    hold.admit(0)
    hold.admit(0)
    train(hold, 0)
    hold.admit(1)
    assert not hold.may_take(1, {1: 1})  # c must wait for a
    assert train(hold, 0) == 1

    drop = Gate(batch_size=1, eta=1, policy=StalenessPolicy.DROP)
    drop.admit(0)
    drop.admit(0)
    train(drop, 0)
    drop.admit(1)
    train(drop, 1)
    assert drop.is_too_old(0)  # a is refunded, and its row issued again

    spans = [[0, 30], [1, 5], [2, 7]]  # a's tokens, had it lived through two swaps
    assert runs_under(StalenessPolicy.PAPER, spans, 2, 1) == [(30, True), (5, True), (7, True)]
    assert runs_under(StalenessPolicy.MASK, spans, 2, 1) == [(30, False), (5, True), (7, True)]


# 2 to 4: holds that do not hold


class WaitsForTheDue(Gate):
    """Wrong: waits only for prompts that must be in this very batch, and admits by eq. 3."""

    def may_admit(self, born: int) -> bool:
        return self.free > 0

    def may_take(self, n_prompts: int, ready: Mapping[int, int]) -> bool:
        if self.policy is not HOLD:
            return True
        due = sum(n for born, n in self._born.items() if born + self.eta <= self.w)
        return due == sum(n for born, n in ready.items() if born + self.eta <= self.w)

    def take(self, borns: Sequence[int]) -> int:
        return unguarded(self, borns)


class JudgesByPublished(Gate):
    """Wrong: the right bound, with the published version v for the clock w."""

    def may_admit(self, born: int) -> bool:
        return self.free > 0 and self._at(self.v, lambda: self._has_room(born))

    def may_take(self, n_prompts: int, ready: Mapping[int, int]) -> bool:
        return self._at(self.v, lambda: Gate.may_take(self, n_prompts, ready))

    def take(self, borns: Sequence[int]) -> int:
        return unguarded(self, borns)

    def _at(self, clock: int, judge: Callable[[], bool]) -> bool:
        w, self.w = self.w, clock
        try:
            return judge()
        finally:
            self.w = w


def unguarded(gate: Gate, borns: Sequence[int]) -> int:
    """The batch as the wrong rule wants it, without the real gate's last check."""
    gate.policy = StalenessPolicy.PAPER
    try:
        return Gate.take(gate, borns)
    finally:
        gate.policy = HOLD


def test_waiting_only_for_those_already_due_fails_at_eta_2() -> None:
    """B = 1, eta = 2: two prompts are due by the same batch, and each alone could still wait."""

    def story(gate: Gate) -> int:
        for _ in range(3):
            gate.admit(0)  # a, b and c: due by batch 2
        train(gate, 0)  # a
        gate.admit(1)  # d: due by batch 3, and ready at once
        if gate.may_take(1, {1: 1}):
            train(gate, 1)
        return max(train(gate, 0), train(gate, 0))

    assert story(WaitsForTheDue(batch_size=1, eta=2, policy=HOLD)) == 3
    assert story(Gate(batch_size=1, eta=2, policy=HOLD)) == 2


def test_judging_by_the_published_version_fails_while_a_push_is_in_flight() -> None:
    """B = 1, eta = 2: update 2 is finished, its push is not, and c is due by batch 2, the next one."""

    def story(gate: Gate) -> int:
        for _ in range(3):
            gate.admit(0)  # a, b and c
        train(gate, 0)
        gate.admit(1)  # d
        train(gate, 0, publish=False)
        if gate.may_take(1, {1: 1}):  # d is ready, c is not
            train(gate, 1)
        return train(gate, 0)

    assert story(JudgesByPublished(batch_size=1, eta=2, policy=HOLD)) == 3
    assert story(Gate(batch_size=1, eta=2, policy=HOLD)) == 2

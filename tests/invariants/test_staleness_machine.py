"""Gate and ledger together, in any order of events that hypothesis can think of, against a plain model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.ledger import Ledger, LedgerEntry, PromptState
from areal_bus.core.parts.staleness import StalenessPolicy, runs_under
from areal_bus.errors import GateShut, ImpossibleEvent
from areal_bus.messages import Refund, Scored
from tests.areal_bus.core.test_head import scored

CHOICE = st.integers(0, 99)


class Machine(RuleBasedStateMachine):
    """Admit, score, fail one or all, lose, lease, take, update, publish, drop, refund; duplicates and old attempts."""

    policy: StalenessPolicy

    @initialize(batch_size=st.integers(1, 3), eta=st.integers(0, 3), n_samples=st.integers(1, 4))
    def begin(self, batch_size: int, eta: int, n_samples: int) -> None:
        self.gate = Gate(batch_size=batch_size, eta=eta, policy=self.policy)
        self.ledger = Ledger()
        self.n_samples = n_samples
        self.batches: list[int] = []  # sizes
        self.trained: set[tuple[int, int]] = set()
        self.n_admitted = self.n_closed = 0

    def held(self, choice: int) -> int:
        """A version that a fed generator may hold: published, or already on its way."""
        return self.gate.v + choice % (self.gate.u - self.gate.v + 1)

    def pick(self, choice: int, *states: PromptState) -> LedgerEntry | None:
        found = [entry for entry in self.ledger.open.values() if entry.state in states]
        return found[choice % len(found)] if found else None

    def scored(self, entry: LedgerEntry, sample: int, attempt: int | None = None) -> Scored:
        return scored(entry.uid, sample, entry.attempt if attempt is None else attempt, max(entry.born, self.gate.v))

    @rule(choice=CHOICE)
    def admit(self, choice: int) -> None:
        born = self.held(choice)
        if self.gate.may_admit(born):
            self.gate.admit(born)
            self.ledger.admit(born=born, n_samples=self.n_samples, holder=f"g{choice % 2}")
            self.n_admitted += 1
        else:
            with pytest.raises(GateShut):
                self.gate.admit(born)

    @rule(choice=CHOICE)
    def score(self, choice: int) -> None:
        entry = self.pick(choice, PromptState.LEASED, PromptState.SCORING)
        if entry is None:
            return
        sample = entry.missing[choice % len(entry.missing)]
        self.ledger.deliver(self.scored(entry, sample))
        with pytest.raises(ImpossibleEvent):  # I4: a second time
            self.ledger.deliver(self.scored(entry, sample))

    @rule(choice=CHOICE)
    def fail_a_score(self, choice: int) -> None:
        """Its sample is left out of the group while two others can be trained; else the prompt is refunded."""
        entry = self.pick(choice, PromptState.LEASED, PromptState.SCORING)
        if entry is None:
            return
        sample = entry.missing[choice % len(entry.missing)]
        self.ledger.fail(self.scored(entry, sample))
        with pytest.raises(ImpossibleEvent):  # I4: a second time
            self.ledger.deliver(self.scored(entry, sample))
        if entry.is_hopeless:
            assert entry.state is not PromptState.READY
            self.refund(entry, Refund.REWARD_ERROR)

    @rule(choice=CHOICE)
    def lose_a_holder(self, choice: int) -> None:
        for entry in self.ledger.lose(f"g{choice % 2}"):
            with pytest.raises(ImpossibleEvent):  # I6: nobody works on it
                self.ledger.deliver(self.scored(entry, entry.missing[0]))

    @rule(choice=CHOICE)
    def lease_again(self, choice: int) -> None:
        entry = self.ledger.queued.first()
        if entry is None:
            return
        self.ledger.lease(entry.uid, f"g{choice % 2}")
        with pytest.raises(ImpossibleEvent):  # I6: an older attempt
            self.ledger.deliver(self.scored(entry, entry.missing[0], entry.attempt - 1))

    @rule(choice=CHOICE, reason=st.sampled_from([Refund.REWARD_ERROR, Refund.SAMPLING_ERROR]))
    def fail(self, choice: int, reason: Refund) -> None:
        entry = self.pick(choice, PromptState.LEASED, PromptState.SCORING, PromptState.QUEUED)
        if entry is not None:
            self.refund(entry, reason)

    def refund(self, entry: LedgerEntry, reason: Refund) -> None:
        self.ledger.refund(entry.uid, reason)
        self.gate.refund(entry.born)
        self.n_closed += 1

    @precondition(lambda self: self.gate.w == self.gate.u)
    @rule()
    def take(self) -> None:
        gate, ledger = self.gate, self.ledger
        while (oldest := ledger.ready.first()) is not None and gate.is_too_old(oldest.born):
            self.refund(oldest, Refund.TOO_OLD)
        size = gate.batch_size
        if len(ledger.ready) < size or not gate.may_take(size, ledger.ready.born):
            return
        entries = ledger.take(size, gate.w)
        clock = gate.take([entry.born for entry in entries])
        self.batches.append(size)
        for entry in entries:
            assert entry.scored.keys() | entry.failed.keys() == set(range(self.n_samples))  # I8
            assert not entry.scored.keys() & entry.failed.keys()
            assert len(entry.scored) >= (2 if entry.failed else self.n_samples)
            for sample, verdict in entry.scored.items():
                assert (entry.uid, sample) not in self.trained  # I4
                self.trained.add((entry.uid, sample))
                runs = runs_under(self.policy, verdict.spans, clock, gate.eta)  # I2: raises where nothing may be older
                lags = [
                    clock - version for (version, _), (_, trained) in zip(verdict.spans, runs, strict=True) if trained
                ]
                assert self.policy is StalenessPolicy.PAPER or all(lag <= gate.eta for lag in lags)
            if self.policy in (StalenessPolicy.HOLD, StalenessPolicy.DROP):
                assert clock - entry.born <= gate.eta  # I2

    @precondition(lambda self: self.gate.w > self.gate.u)
    @rule()
    def update(self) -> None:
        self.gate.finish_update(self.gate.w)
        self.n_closed += len(self.ledger.trained(self.gate.u - 1))

    @rule()
    def publish(self) -> None:
        self.gate.publish(self.gate.u)

    @invariant()
    def the_counts_add_up(self) -> None:
        if not hasattr(self, "gate"):
            return
        gate, ledger = self.gate, self.ledger
        in_training = sum(self.batches[gate.v :])
        assert gate.live == ledger.n_live  # I3
        assert gate.in_training == in_training
        assert gate.live + gate.in_training <= (gate.eta + 1) * gate.batch_size  # I1
        assert len(ledger.open) + self.n_closed == self.n_admitted == sum(ledger.counts.values())  # I3
        assert gate.v <= gate.u <= gate.w <= gate.u + 1  # I6

    def teardown(self) -> None:
        """I11: with everybody done and everything published, a prompt can be admitted or a batch taken."""
        if not hasattr(self, "gate"):
            return
        for _ in range(20):
            before = self.gate.w
            if self.gate.w > self.gate.u:
                self.update()
            self.gate.publish(self.gate.u)
            while self.ledger.queued.first() is not None:
                self.lease_again(0)
            while (entry := self.pick(0, PromptState.LEASED, PromptState.SCORING)) is not None:
                self.score(0)
            while self.gate.may_admit(self.gate.v) and len(self.ledger.ready) < self.gate.batch_size:
                self.admit(0)
                while (entry := self.pick(0, PromptState.LEASED)) is not None:
                    self.ledger.deliver(self.scored(entry, entry.missing[0]))
            self.take()
            self.gate.publish(self.gate.u)  # of the version before: the batch in training keeps its credits
            self.the_counts_add_up()
            assert self.gate.w == before + 1, "somebody must be able to go on"


def machine_of(chosen: StalenessPolicy) -> type:
    class OfPolicy(Machine):
        policy = chosen

    OfPolicy.TestCase.settings = settings(
        max_examples=60, stateful_step_count=60, deadline=None, derandomize=True, database=None
    )
    return OfPolicy.TestCase


TestMask = machine_of(StalenessPolicy.MASK)
TestHold = machine_of(StalenessPolicy.HOLD)
TestDrop = machine_of(StalenessPolicy.DROP)
TestPaper = machine_of(StalenessPolicy.PAPER)

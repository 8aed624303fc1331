"""I1 to I12 over seeded schedules of whole rings, under every policy, with faults of every kind.

Each invariant is also broken on purpose in the head (a rule left out), to see that the witness would notice.
`make soak-staleness` runs a million of these schedules.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.members import membership
from areal_bus.core.parts import gate, ledger
from areal_bus.core.parts.ledger import PromptState
from areal_bus.core.parts.push_queue import PushQueue
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.state import HeadState
from areal_bus.core.transitions import batcher, scheduler
from areal_bus.core.transitions.publisher import Publisher
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.messages import Refund, Role, VerdictStatus
from areal_lab.staleness.simulator.disk import Disk
from areal_lab.staleness.simulator.ring import Ring, ScheduleOutcome
from areal_lab.staleness.simulator.scenario import Fault, Scenario, draw

N_SCHEDULES = 400  # a policy
ROLES = ("generator", "reward", "learner", "head")


def torn(seed: int, policy: StalenessPolicy) -> Scenario:
    """Long enough, with two checkpoints kept, that a learner comes back to a damaged one and goes on from the other."""
    rng = random.Random(f"torn {seed}")
    tears = (Fault("tear", Role.LEARNER, 0, rng.uniform(30, 80), 2.0), Fault("tear", Role.LEARNER, 0, 110.0, 2.0))
    plan = replace(draw(seed, policy), checkpoint_every=1, checkpoint_keep=2, checkpoint_s=0.1, frontier_s=0.1)
    return replace(plan, total_steps=12, n_rows=None, faults=(*plan.faults, *tears), calm_s=max(120.0, plan.calm_s))


class Slice:
    """Outcomes of the default slice: checks and violations by invariant."""

    def __init__(self) -> None:
        self.n_checks: Counter[str] = Counter()
        self.violations: list[tuple[int, str, str]] = []  # seed, policy, text
        self.n_done: Counter[str] = Counter()  # by policy
        self.n_undone: Counter[str] = Counter()  # prompts that were trained and are open again, by policy
        self.reasons: Counter[str] = Counter()
        self.met: Counter[str] = Counter()  # faults that found somebody, and what came of them
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Disk, "tear", self._tear_and_count)
            for policy in StalenessPolicy:
                for seed in range(N_SCHEDULES):
                    ring = Ring(draw(seed, policy) if seed % 20 else torn(seed, policy))
                    self._add(seed, policy, ring, ring.run())

    def _add(self, seed: int, policy: StalenessPolicy, ring: Ring, outcome: ScheduleOutcome) -> None:
        self.n_checks += ring.witness.n_checks
        self.violations += [(seed, str(policy), str(violation)) for violation in outcome.violations]
        self.n_done[policy] += outcome.end is not None and outcome.end.code == 0
        self.n_undone[policy] += ring.witness.n_undone
        self.met["term"] += ring.witness.n_terms
        self.met["life of the head"] += ring.head.state.incarnation
        self.met["masked token"] += ring.witness.n_masked
        self.met += ring.n_faults
        self.reasons += Counter({str(reason): n for reason, n in ring.head.state.ledger.refunds.items()})

    @property
    def _tear_and_count(self) -> Callable[[Disk], None]:
        tear = Disk.tear

        def count(disk: Disk) -> None:
            before = len(disk.checkpoints)
            tear(disk)
            self.met["torn checkpoint"] += before - len(disk.checkpoints)

        return count

    def of(self, invariant: str) -> list[tuple[int, str, str]]:
        """What broke it; `python -m areal_lab.staleness replay SEED --policy P` tells the story."""
        if self.n_checks[invariant] == 0:
            raise LookupError(f"{invariant} was never checked")
        return [found for found in self.violations if found[2].startswith(f"{invariant} ")]


@pytest.fixture(scope="module")
def schedules() -> Slice:
    return Slice()


Sabotage = Callable[[pytest.MonkeyPatch], None]


def first_break(monkeypatch: pytest.MonkeyPatch, sabotage: Sabotage, *, policy: StalenessPolicy | None = None) -> str:
    """Break the head's rule and run schedules until one violates something: which invariant."""
    with monkeypatch.context() as patch:
        sabotage(patch)
        for seed in range(600):
            outcome = Ring(draw(seed, policy)).run()
            if outcome.violations:
                return outcome.violations[0].invariant
    return "none"


def test_I1_backlog(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not schedules.of("I1")

    def credits_return_early(patch: pytest.MonkeyPatch) -> None:
        take = gate.Gate.take

        def wrong(self: Any, borns: Any) -> int:
            clock = take(self, borns)
            self.in_training = 0
            self._taken.clear()
            return clock

        patch.setattr(gate.Gate, "take", wrong)

    assert first_break(monkeypatch, credits_return_early) == "I1"


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_I2_age(schedules: Slice, monkeypatch: pytest.MonkeyPatch, policy: StalenessPolicy) -> None:
    assert not schedules.of("I2")

    def trains_everything(patch: pytest.MonkeyPatch) -> None:
        runs = lambda *args: [(n, True) for _, n in args[1]]  # noqa: E731
        patch.setattr("areal_lab.staleness.simulator.learner.runs_under", runs)
        patch.setattr(batcher, "runs_under", runs)
        patch.setattr(gate.Gate, "may_take", lambda *_: True)
        patch.setattr(gate.Gate, "is_too_old", lambda *_: False)
        patch.setattr(gate, "StalenessPolicy", Deaf)

    expected = "none" if policy is StalenessPolicy.PAPER else "I2"
    assert first_break(monkeypatch, trains_everything, policy=policy) == expected


class Deaf:
    """Policies that no gate is of."""

    HOLD = DROP = MASK = PAPER = None


def test_I3_conservation(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not schedules.of("I3")

    def forgets_a_count(patch: pytest.MonkeyPatch) -> None:
        def wrong(self: Any, entry: Any, state: Any) -> None:
            if state is not ledger.PromptState.REFUNDED:
                self.counts[entry.state] -= 1
            self.counts[state] += 1
            entry.state = state

        patch.setattr(ledger.Ledger, "_move", wrong)

    assert first_break(monkeypatch, forgets_a_count) == "I3"


def test_I4_exactly_once(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not schedules.of("I4")

    def counts_results_twice(patch: pytest.MonkeyPatch) -> None:
        deliver = ledger.Ledger.deliver

        def wrong(self: Any, scored: Any) -> Any:
            entry = self.open.get(scored.uid)
            if entry is not None and scored.sample in entry.scored and entry.state is ledger.PromptState.LEASED:
                return entry
            return deliver(self, scored)

        patch.setattr(ledger.Ledger, "deliver", wrong)

    assert first_break(monkeypatch, counts_results_twice) in ("I4", "I6")


def test_I5_version_truth(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not schedules.of("I5")

    def restamps(patch: pytest.MonkeyPatch) -> None:
        item = batcher.item

        def wrong(scored: Any, **more: Any) -> Any:
            made = item(scored, **more)
            spans = [[made.spans[-1][0], sum(n for _, n in made.spans)]]  # as of the last swap
            return type(made)(**{name: getattr(made, name) for name in made.__slots__} | {"spans": spans})

        patch.setattr(batcher, "item", wrong)

    assert first_break(monkeypatch, restamps) == "I5"


def test_I6_one_clock(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not schedules.of("I6")

    def takes_older_attempts(patch: pytest.MonkeyPatch) -> None:
        of = ledger.Ledger._of

        def wrong(self: Any, uid: int, attempt: int) -> Any:
            entry = self.open.get(uid)
            return of(self, uid, entry.attempt if entry is not None else attempt)

        patch.setattr(ledger.Ledger, "_of", wrong)

    assert first_break(monkeypatch, takes_older_attempts) in ("I5", "I6")


def test_I7_born_fresh(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not schedules.of("I7")

    def leases_to_everybody(patch: pytest.MonkeyPatch) -> None:
        alive = (membership.MemberState.STALE, membership.MemberState.HEALTHY)
        patch.setattr(
            HeadState,
            "eligible_generators",
            lambda self: [x for x in self.members.of(Role.GENERATOR, *alive) if x.version is not None],
        )

    assert first_break(monkeypatch, leases_to_everybody) == "I7"


def test_I8_groups(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not schedules.of("I8")

    def trains_what_is_there(patch: pytest.MonkeyPatch) -> None:
        deliver = ledger.Ledger.deliver

        def wrong(self: Any, scored: Any) -> Any:
            entry = deliver(self, scored)
            if (
                entry.state in (ledger.PromptState.LEASED, ledger.PromptState.SCORING)
                and not self.counts[ledger.PromptState.READY]
            ):
                self.ready.add(entry)
                self._move(entry, ledger.PromptState.READY)
            return entry

        patch.setattr(ledger.Ledger, "deliver", wrong)

    assert first_break(monkeypatch, trains_what_is_there) == "I8"


def test_I8_a_group_trained_before_an_older_whole_one_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_the_youngest(patch: pytest.MonkeyPatch) -> None:
        take = ledger.Ledger.take

        def wrong(self: Any, n: int, step: int) -> Any:
            return take(self, n, step)[::-1]

        patch.setattr(ledger.Ledger, "take", wrong)

    assert first_break(monkeypatch, takes_the_youngest, policy=StalenessPolicy.MASK) == "I8"


def test_I6_a_version_published_without_a_push_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def pushes_to_nobody(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Publisher, "_those_in_step", lambda self, version: [])

    assert first_break(monkeypatch, pushes_to_nobody) == "I6"


def test_I6_a_publish_line_that_counts_its_members_wrongly_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts_those_who_missed_it(patch: pytest.MonkeyPatch) -> None:
        publish = Publisher._publish

        def wrong(self: Any, version: int, *, n_members: int) -> None:
            publish(self, version, n_members=n_members + 1)

        patch.setattr(Publisher, "_publish", wrong)

    assert first_break(monkeypatch, counts_those_who_missed_it) == "I6"


def test_I11_an_end_for_pushes_that_were_not_missed_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss or two make no generator hopeless, whatever the head says of it at its end."""

    def blames_whoever_was_there(patch: pytest.MonkeyPatch) -> None:
        keep_apart = PushQueue._quarantine

        def wrong(self: Any, name: str, push: Any, now: float, *, is_blamed: bool) -> None:
            for _ in range(self.patience):
                keep_apart(self, name, push, now, is_blamed=True)

        patch.setattr(PushQueue, "_quarantine", wrong)

    assert first_break(monkeypatch, blames_whoever_was_there) == "I11"


def test_I9_back_pressure(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a generator is given has a bound, too: its slots. Queues in bytes are the bus's
    (tests/areal_bus/transport/test_bus.py).
    """
    assert not schedules.of("I9")

    def gives_without_looking(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(scheduler.Scheduler, "_fits", lambda *_, **__: True)

    assert first_break(monkeypatch, gives_without_looking) == "I9"


def test_I10_reward_truth(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not schedules.of("I10")
    assert schedules.reasons["reward_error"] > 100
    assert schedules.reasons["reward_timeout"] > 100

    def scores_errors_zero(patch: pytest.MonkeyPatch) -> None:
        scored = Rollouts.scored

        def wrong(self: Any, message: Any) -> None:
            fields = {name: getattr(message, name) for name in message.__slots__}
            if message.status != VerdictStatus.VALUE:
                fields |= {"status": "value", "reward": 0.0}
            scored(self, type(message)(**fields))

        patch.setattr(Rollouts, "scored", wrong)

    assert first_break(monkeypatch, scores_errors_zero) == "I10"


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_I11_liveness(schedules: Slice, monkeypatch: pytest.MonkeyPatch, policy: StalenessPolicy) -> None:
    """When faults stop, updates go on to the end of the run, or the job ends with a sentence that says why."""
    assert not [found for found in schedules.of("I11") if found[1] == policy]
    assert schedules.n_done[policy] > 0.9 * N_SCHEDULES

    def nobody_catches_up(patch: pytest.MonkeyPatch) -> None:
        begin = Publisher._begin

        def wrong(self: Any, now: float) -> None:
            if self.gate.u > self.gate.v or self.gate.v == 0:
                begin(self, now)

        patch.setattr(Publisher, "_begin", wrong)

    assert first_break(monkeypatch, nobody_catches_up, policy=policy) == "I11"


def test_I12_accounting(schedules: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not schedules.of("I12")

    def counts_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
        record = Effects.record

        def wrong(self: Any, event: Event, **fields: Any) -> None:
            record(self, event, **fields | ({"n_tokens": fields["n_tokens"] + 1} if event is Event.TRAJECTORY else {}))

        patch.setattr(Effects, "record", wrong)

    assert first_break(monkeypatch, counts_a_token_too_many) == "I12"


def groups_younger_than_the_bound_are_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gate.Gate, "is_too_old", lambda self, born: born < self.u)


def some_are_refunded_as_the_end_of_the_run(patch: pytest.MonkeyPatch) -> None:
    some_are_refunded(patch, Refund.END_OF_RUN)


def some_are_refunded_for_a_verdict_that_was_none(patch: pytest.MonkeyPatch) -> None:
    some_are_refunded(patch, Refund.REWARD_TIMEOUT)


def some_are_refunded(patch: pytest.MonkeyPatch, reason: Refund) -> None:
    scored = Rollouts.scored

    def wrong(self: Any, message: Any) -> None:
        scored(self, message)
        entry = self.ledger.open.get(message.uid)
        if (
            entry is not None
            and not message.evaluation
            and message.uid % 7 == 3
            and entry.state is not PromptState.TRAINING
        ):
            self.refund(entry, reason)

    patch.setattr(Rollouts, "scored", wrong)


@pytest.mark.parametrize(
    "sabotage",
    [
        groups_younger_than_the_bound_are_dropped,
        some_are_refunded_as_the_end_of_the_run,
        some_are_refunded_for_a_verdict_that_was_none,
    ],
)
def test_I3_a_refund_for_a_reason_that_is_not_so_is_detected(
    sabotage: Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = StalenessPolicy.DROP if sabotage is groups_younger_than_the_bound_are_dropped else None
    assert first_break(monkeypatch, sabotage, policy=policy) == "I3"


def test_I2_wrongly_reported_masks_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def tells_of_no_mask(patch: pytest.MonkeyPatch) -> None:
        record = Effects.record

        def wrong(self: Any, event: Event, **fields: Any) -> None:
            record(self, event, **fields | ({"n_masked": 0} if event is Event.TRAJECTORY else {}))

        patch.setattr(Effects, "record", wrong)

    assert first_break(monkeypatch, tells_of_no_mask, policy=StalenessPolicy.MASK) == "I2"


def test_the_schedules_exercise_masks_drops_refusals_deaths_and_terms(schedules: Slice) -> None:
    """Masks, drops, refusals, deaths of every role, terms: a slice without them would prove little."""
    assert not schedules.violations
    assert schedules.met["masked token"] > 100
    assert schedules.reasons["too_old"] > 10
    assert schedules.reasons["sampling_error"] > 30
    assert schedules.reasons["end_of_data"] > 30
    assert min(schedules.n_checks[f"I{i}"] for i in range(1, 13)) > 1000
    met = schedules.met
    assert met["term"] > 2 * sum(met[f"crash of {role}"] for role in ("learner", "head")) > 100
    assert met["life of the head"] > 50
    assert min(schedules.n_undone[policy] for policy in StalenessPolicy) > 5
    assert met["kill of head"] > 10  # the whole job
    assert met["drain of head"] > 30
    assert met["torn checkpoint"] > 5
    assert min(met[f"{kind} of {role}"] for kind in ("crash", "stop", "cut") for role in ROLES) > 20
    assert min(met[f"{kind} of generator"] for kind in ("leave", "reset", "deaf")) > 15
    assert min(schedules.n_done[policy] for policy in StalenessPolicy) > 100


@pytest.mark.slow
@pytest.mark.parametrize("policy", StalenessPolicy)
def test_large_batches_and_windows_hold_them_all(policy: StalenessPolicy) -> None:
    """What small schedules never have: dozens of prompts a batch, many batches a window, whatever dies."""
    for seed in range(12):
        rng = random.Random(seed)
        scenario = draw(seed, policy)
        wide = replace(
            scenario,
            batch_size=rng.choice((8, 16, 32)),
            eta=rng.choice((4, 8, 16)),
            n_samples=rng.choice((1, 4)),
            total_steps=6,
            n_rows=None,
            capacity=rng.choice((16, 64)),
            n_problems=0,
        )
        assert not Ring(wide).run().violations, seed

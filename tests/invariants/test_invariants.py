"""I1 to I12 over seeded schedules of whole rings, under every policy, with faults of every kind.

Each invariant is also broken on purpose in the head (a rule left out), to see that the witness would notice.
`make soak-staleness` runs a million of these schedules.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.messages import Role
from areal_lab.staleness.simulator.disk import Disk
from areal_lab.staleness.simulator.ring import Ring, ScheduleOutcome
from areal_lab.staleness.simulator.scenario import Fault, Scenario, draw
from tests.invariants import left_out as rule

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
                    ring.records = []
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
        self.met["continued sample"] += sum(one.n_continued for one in ring.witness.generators.values())
        for _, line in ring.records or ():
            self.met["life of a learner after its head's"] += line.event is Event.TERM and line.fields["lives_on"]
            self.met["return from a copy"] += line.event is Event.TERM and "restored" in line.fields
            self.met["change of the split"] += line.event is Event.SPLIT and line.fields["why"] == "change"
            self.met["short group"] += line.event is Event.READY and "missing" in line.fields
            self.met["compared group"] += line.event is Event.COMPARED
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


LEFT_OUT = [  # the invariant that breaks, the rule, the policy of the schedules
    ("I1", rule.credits_return_early, None),
    *(("I2", rule.everything_is_trained, policy) for policy in StalenessPolicy if policy is not StalenessPolicy.PAPER),
    ("none", rule.everything_is_trained, StalenessPolicy.PAPER),
    ("I2", rule.no_mask_is_journalled, StalenessPolicy.MASK),
    ("I3", rule.a_count_is_forgotten, None),
    ("I3", rule.groups_younger_than_the_bound_are_dropped, StalenessPolicy.DROP),
    ("I3", rule.some_are_refunded_as_the_end_of_the_run, None),
    ("I3", rule.some_are_refunded_for_a_verdict_that_was_none, None),
    ("I4 I6", rule.results_are_counted_twice, None),
    ("I5", rule.tokens_are_stamped_anew, None),
    ("I5 I6", rule.older_attempts_count, None),
    ("I6", rule.nobody_is_pushed_to, None),
    ("I6", rule.members_of_a_push_are_miscounted, None),
    ("I7", rule.everybody_is_leased_to, None),
    ("I8", rule.a_group_is_ready_early, None),
    ("I8", rule.the_youngest_groups_come_first, StalenessPolicy.MASK),
    ("I9", rule.slots_are_not_looked_at, None),  # bytes of queues: tests/areal_bus/transport/test_bus.py
    ("I10", rule.errors_are_scored_zero, None),
    *(("I11", rule.nobody_catches_up, policy) for policy in StalenessPolicy),
    ("I11", rule.one_miss_makes_hopeless, None),
    ("I12", rule.a_token_too_many_is_counted, None),
]


@pytest.mark.parametrize("invariant", [f"I{n}" for n in range(1, 13)])
def test_an_invariant_holds_in_every_schedule(schedules: Slice, invariant: str) -> None:
    assert not schedules.of(invariant)


@pytest.mark.parametrize(("broken", "sabotage", "policy"), LEFT_OUT)
def test_a_rule_left_out_breaks_its_invariant(
    monkeypatch: pytest.MonkeyPatch, broken: str, sabotage: rule.Sabotage, policy: StalenessPolicy | None
) -> None:
    sabotage(monkeypatch)
    n_seeds = 600 if broken != "none" else 100
    violations = (Ring(draw(seed, policy)).run().violations for seed in range(n_seeds))
    assert next((found[0].invariant for found in violations if found), "none") in broken.split()


def test_the_schedules_exercise_masks_drops_refusals_deaths_and_terms(schedules: Slice) -> None:
    assert not schedules.violations
    assert schedules.met["masked token"] > 100
    assert schedules.reasons["too_old"] > 10
    assert schedules.reasons["no_signal"] > 100
    assert schedules.reasons["sampling_error"] > 30
    assert schedules.reasons["end_of_data"] > 30
    assert min(schedules.reasons["reward_error"], schedules.reasons["reward_timeout"]) > 100
    assert min(schedules.n_checks[f"I{i}"] for i in range(1, 13)) > 1000
    met = schedules.met
    assert met["term"] > 2 * sum(met[f"crash of {role}"] for role in ("learner", "head")) > 100
    assert met["life of the head"] > 50
    assert min(schedules.n_undone[policy] for policy in StalenessPolicy) > 5
    assert min(met["continued sample"], met["life of a learner after its head's"], met["return from a copy"]) > 20
    assert min(met["change of the split"], met["short group"], met["compared group"]) > 50
    assert met["kill of head"] > 10  # the whole job
    assert met["drain of head"] > 30
    assert met["torn checkpoint"] > 5
    assert min(met[f"{kind} of {role}"] for kind in ("crash", "stop", "cut") for role in ROLES) > 20
    assert min(met[f"{kind} of generator"] for kind in ("leave", "reset", "deaf")) > 15
    assert min(schedules.n_done[policy] for policy in StalenessPolicy) > 0.9 * N_SCHEDULES  # I11


@pytest.mark.slow
@pytest.mark.parametrize("policy", StalenessPolicy)
def test_large_batches_and_windows_hold_them_all(policy: StalenessPolicy) -> None:
    """What small schedules never have: dozens of prompts a batch, many batches a window, whatever dies."""
    for seed in range(6):
        rng = random.Random(seed)
        wide = replace(
            draw(seed, policy),
            batch_size=rng.choice((8, 16, 32)),
            eta=rng.choice((4, 8, 16)),
            n_samples=rng.choice((1, 4)),
            total_steps=6,
            n_rows=None,
            capacity=rng.choice((16, 64)),
            n_problems=0,
        )
        assert not Ring(wide).run().violations, seed

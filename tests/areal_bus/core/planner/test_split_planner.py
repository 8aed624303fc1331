"""The model of a ring, the figures that are measured for it, and the decisions of the planner."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from math import exp
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.planner.ring_observer import LengthShift, RingObserver
from areal_bus.core.planner.split_planner import STAY, PlannerRules, RingFigures, SplitPlanner, updates_per_s

RING = RingFigures(
    batch_size=8, n_samples=4, slots=16, mean_tokens=200.0, longest_tokens=300.0, decode_s=0.004,
    decode_sample_s=0.001, train_s=0.2, train_token_s=0.0005, push_s=0.1,
)  # fmt: skip
POSITIVE = st.floats(1e-5, 10.0)
SECONDS = ("decode_s", "decode_sample_s", "train_s", "train_token_s", "push_s", "reward_s")
FIGURES = st.builds(
    RingFigures,
    batch_size=st.integers(1, 64),
    n_samples=st.integers(1, 16),
    slots=st.integers(1, 64),
    mean_tokens=st.floats(1.0, 1e4),
    longest_tokens=st.floats(1.0, 1e4),
    **dict.fromkeys(SECONDS, POSITIVE),
)


def rules(n_ranks: int = 8, *, every_steps: int = 5, eta: int = 4) -> PlannerRules:
    splits = {learners: n_ranks - learners for learners in range(1, n_ranks)}
    return PlannerRules(
        every_steps=every_steps, total_steps=1000, eta=eta, generators_at=splits, slots=RING.slots, change_s=2.0
    )


def best_split(ring: RingFigures, n_ranks: int = 8, eta: int = 4) -> int:
    def speed(learners: int) -> float:
        return updates_per_s(ring, learners=learners, generators=n_ranks - learners, eta=eta)

    return max(range(1, n_ranks), key=speed)


@given(ring=FIGURES, learners=st.integers(1, 9), generators=st.integers(1, 9), eta=st.integers(0, 16))
def test_no_split_is_faster_than_its_slower_half(ring: RingFigures, learners: int, generators: int, eta: int) -> None:
    found = updates_per_s(ring, learners=learners, generators=generators, eta=eta)
    slots = generators * ring.slots / ring.step_s(ring.slots) / ring.batch_tokens
    assert 0 < found <= 1 / ring.update_s(learners) * (1 + 1e-9)
    assert eta == 0 or found <= slots * (1 + 1e-9)


def test_a_larger_eta_is_never_slower() -> None:
    speeds = [updates_per_s(RING, learners=2, generators=6, eta=eta) for eta in range(1, 17)]
    assert speeds == sorted(speeds)
    assert speeds[0] < speeds[-1]


def test_a_ring_without_a_generator_or_learner_is_refused() -> None:
    with pytest.raises(ValueError, match="a learner and a generator"):
        updates_per_s(RING, learners=1, generators=0, eta=1)
    with pytest.raises(ValueError, match="a learner and a generator"):
        SplitPlanner(replace(rules(), generators_at={1: 1, 2: 0}))


@given(st.lists(FIGURES, min_size=1, max_size=60), st.integers(1, 7), st.integers(1, 9))
def test_any_figures_lead_to_a_split_that_is_allowed_and_at_most_one_change_in_every_steps(
    found: list[RingFigures], learners: int, every_steps: int
) -> None:
    planner, changes = SplitPlanner(rules(every_steps=every_steps)), [0]
    for step, ring in enumerate(found, start=1):
        decision = planner.decide(step, ring, learners)
        if decision.learners is None:
            assert decision == STAY
            continue
        assert decision.learners != learners
        assert list(decision.predicted) == list(range(1, 8))
        assert decision.predicted[decision.learners] > decision.predicted[learners]
        learners = decision.learners
        changes.append(step)
    assert all(b - a >= every_steps for a, b in itertools.pairwise(changes))


def test_without_figures_the_split_stays() -> None:
    assert SplitPlanner(rules()).decide(100, None, 2) == STAY


def drive(planner: SplitPlanner, learners: int, rings: list[RingFigures]) -> list[int]:
    """The learner ranks after each update."""
    found = []
    for step, ring in enumerate(rings, start=1):
        learners = planner.decide(step, ring, learners).learners or learners
        found.append(learners)
    return found


def noisy(seed: int, ring: RingFigures = RING) -> RingFigures:
    rng = random.Random(seed)
    return replace(
        ring,
        mean_tokens=ring.mean_tokens * rng.lognormvariate(0, 0.05),
        decode_sample_s=ring.decode_sample_s * rng.lognormvariate(0, 0.05),
        train_token_s=ring.train_token_s * rng.lognormvariate(0, 0.05),
    )


def test_a_wrong_split_becomes_the_right_one_and_stays_under_stationary_noise() -> None:
    """The change is made once: noise of 5 % in every figure is no reason for another."""
    right = best_split(RING)
    for seed in range(20):
        splits = drive(SplitPlanner(rules()), 7, [noisy(1000 * seed + i) for i in range(300)])
        assert abs(splits[-1] - right) <= 1
        assert sum(a != b for a, b in itertools.pairwise(splits)) <= 2, seed


def test_without_hysteresis_noise_changes_the_split_again_and_again() -> None:
    free = replace(rules(every_steps=1), hysteresis=0.0, change_s=0.0)
    splits = drive(SplitPlanner(free), 7, [noisy(i) for i in range(300)])
    assert sum(a != b for a, b in itertools.pairwise(splits)) > 5


def test_a_change_that_costs_more_than_the_rest_of_the_run_saves_is_not_made() -> None:
    costly = replace(rules(), total_steps=60, change_s=1e4)
    assert set(drive(SplitPlanner(costly), 7, [RING] * 50)) == {7}


def play(observer: RingObserver, *, n_updates: int, length: Callable[[int], int]) -> None:
    """Two generators decode 4 samples each at a time; every update takes 2 s for its tokens on 2 ranks."""
    now, uid = 0.0, 0
    for version in range(1, n_updates + 1):
        lengths = [length(version)] * 2
        for i, holder in enumerate(("generator-0.0", "generator-1.0")):
            observer.leased(uid + i, holder, 4, now)
        now += lengths[0] * (0.01 + 4 * 0.002)
        for i in range(2):
            for _ in range(4):
                observer.sampled(uid + i, lengths[i], now)
            observer.ready(uid + i, now + 0.1)
        uid += 2
        observer.taken(2, now)
        n_tokens = 8 * lengths[0]
        now += 0.001 * n_tokens / 2
        observer.updated(version, n_tokens, now)
        observer.published(version, now + 0.3)


def measured(observer: RingObserver) -> RingFigures:
    assert observer.figures is not None
    return observer.figures


def test_the_observer_measures_lengths_speeds_and_pushes() -> None:
    observer = RingObserver(batch_size=2, n_samples=4, slots=8)
    assert RingObserver(batch_size=2, n_samples=4, slots=8).figures is None
    play(observer, n_updates=30, length=lambda version: 100 if version <= 15 else 200)
    figures = measured(observer)
    assert figures.mean_tokens == pytest.approx(200, rel=0.02)
    assert figures.step_s(4) == pytest.approx(0.018, rel=0.02)  # where it was measured; the slope is a guess here
    assert figures.update_s(2) == pytest.approx(0.8, rel=0.05)
    assert figures.push_s == pytest.approx(0.3)
    assert figures.reward_s == pytest.approx(0.1)


def test_the_observer_measures_decoding_and_the_number_of_live_samples() -> None:
    observer = RingObserver(batch_size=1, n_samples=4, slots=16)
    for version in range(1, 20):
        now = 10.0 * version
        observer.leased(version, "generator-0.0", 4, now)
        for i in range(4):  # one at a time ends, after 1, 2, 3 and 4 s
            observer.sampled(version, 10 * (i + 1), now + i + 1)
        observer.taken(1, now + 4)
        observer.updated(version, 100, now + 6)
    figures = measured(observer)
    live = fmean([4, 7 / 2, 9 / 3, 10 / 4])  # beside each sample, on average over its time
    assert figures.step_s(live) == pytest.approx(0.1, rel=0.01)


def test_lengths_that_double_are_believed_within_two_updates() -> None:
    observer = RingObserver(batch_size=2, n_samples=4, slots=8)
    play(observer, n_updates=17, length=lambda version: 100 if version <= 15 else 200)
    figures = measured(observer)
    assert figures.mean_tokens == pytest.approx(200, rel=0.08)
    assert figures.longest_tokens == pytest.approx(200, rel=0.08)


@pytest.mark.parametrize("alike", [0.0, 0.5])
def test_a_shift_of_lengths_is_seen_at_once_and_their_spread_is_none(alike: float) -> None:
    """Lengths whose logarithms vary by 0.6, `alike` in a group by this correlation: 16 groups of 8 an update."""
    rng = random.Random(5)
    n_alarms = n_seen = 0
    for _ in range(50):
        shift = LengthShift()
        for _ in range(20):
            groups = [drawn_lengths(rng, 8, alike) for _ in range(16)]
            lengths = [length for group in groups for length in group]
            n_alarms += shift.is_seen(lengths)
            shift.add(lengths, groups)
            shift.fade(0.7)
        assert not shift.is_seen([1000] * 7)  # too few
        n_seen += shift.is_seen([2 * length for length in lengths])
    assert n_alarms <= 10  # of 1,000; alike and taken as independent they are 113
    assert n_seen >= 48


def drawn_lengths(rng: random.Random, n: int, alike: float) -> list[int]:
    common = rng.gauss(0.0, alike**0.5)
    return [max(1, round(exp(5.0 + 0.6 * (common + rng.gauss(0.0, (1 - alike) ** 0.5))))) for _ in range(n)]


def test_a_lost_lease_frees_its_slots() -> None:
    """Samples of a group that is leased again elsewhere, or refunded, count no more where they were."""
    observer = RingObserver(batch_size=1, n_samples=4, slots=4)
    observer.leased(0, "generator-0.0", 4, 0.0)
    observer.leased(1, "generator-0.0", 4, 0.0)  # waits
    observer.leased(0, "generator-1.0", 4, 5.0)  # 1 begins now
    for _ in range(4):
        observer.sampled(1, 10, 7.0)
    observer.taken(1, 7.0)
    for version in (1, 2, 3):
        observer.updated(version, 40, 7.0 + version)
        observer.taken(1, 7.0 + version)
    figures = measured(observer)
    assert figures.step_s(4) == pytest.approx(0.2)  # 2 s for 10 tokens, not 7 s


def test_a_complete_group_frees_the_slots_of_samples_that_were_not_seen_to_end() -> None:
    """A sample that ends while the observer takes it for a waiting one, or that fails, leaves no live sample behind."""
    observer = RingObserver(batch_size=1, n_samples=2, slots=2)
    for uid in range(4):
        observer.leased(2 * uid, "generator-0.0", 2, 10.0 * uid)
        observer.leased(2 * uid + 1, "generator-0.0", 2, 10.0 * uid)  # waits
        observer.sampled(2 * uid + 1, 10, 10.0 * uid + 1)  # the generator took it first
        for end in (2, 2):
            observer.sampled(2 * uid, 10, 10.0 * uid + end)
        observer.sampled(2 * uid + 1, 10, 10.0 * uid + 4)
        observer.ready(2 * uid, 10.0 * uid + 5)
        observer.ready(2 * uid + 1, 10.0 * uid + 5)
    observer.interrupted([], 50.0)  # what was measured above does not count
    observer.leased(8, "generator-0.0", 2, 50.0)
    for _ in range(2):
        observer.sampled(8, 10, 52.0)
    observer.taken(1, 52.0)
    for version in (1, 2, 3):
        observer.updated(version, 20, 52.0 + version)
        observer.taken(1, 52.0 + version)
    figures = measured(observer)
    assert figures.step_s(2) == pytest.approx(0.2)  # 2 s for 10 tokens of two live samples

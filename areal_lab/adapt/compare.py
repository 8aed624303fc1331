"""Compares, on one workload: every fixed split, a clairvoyant schedule of splits, and the production planner."""

import itertools
from dataclasses import dataclass

from areal_bus.core.planner.ring_observer import RingObserver
from areal_bus.core.planner.split_planner import PlannerRules, SplitPlanner
from areal_lab.adapt.ring import AdaptiveRing, Wish
from areal_lab.adapt.scenario import ShiftingWorkload

EVERY_STEPS = 10


@dataclass(frozen=True, slots=True)
class PlannerRun:
    """One run with the planner."""

    throughput: float  # trained tokens a second
    changes: dict[int, int]  # step -> learner ranks, as the planner chose them
    mean_lag: float  # versions, over trained tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """Throughputs in trained tokens a second."""

    workload: ShiftingWorkload
    fixed: dict[int, float]  # learner ranks -> throughput
    clairvoyant: float
    plan: dict[int, int]  # step -> learner ranks, of the clairvoyant schedule
    planner: PlannerRun

    @property
    def best_fixed(self) -> int:
        """Learner ranks of the best fixed split."""
        return max(self.fixed, key=self.fixed.__getitem__)

    @property
    def of_clairvoyant(self) -> float:
        return self.planner.throughput / self.clairvoyant

    @property
    def over_best_fixed(self) -> float:
        return self.planner.throughput / self.fixed[self.best_fixed] - 1


def compare(workload: ShiftingWorkload, *, every_steps: int = EVERY_STEPS) -> Comparison:
    """Simulate the workload with each."""
    rings = {learners: AdaptiveRing(workload, learners=learners) for learners in workload.plausible_splits}
    fixed = {learners: ring.run_all(stay) for learners, ring in rings.items()}
    clairvoyant, plan = best_schedule(workload, rings, fixed)
    planner = run_planner(workload, learners=first_split(workload, rings), every_steps=every_steps)
    return Comparison(workload, fixed, clairvoyant, plan, planner)


def first_split(workload: ShiftingWorkload, rings: dict[int, AdaptiveRing]) -> int:
    """Learner ranks of the best split for the lengths at first, as `areal_lab.simulate` finds it before a start."""
    return min(rings, key=lambda learners: rings[learners].update_ends[workload.phase_starts[1] - 1])


def stay(step: int) -> None:
    """The wish of a fixed split."""


def best_schedule(
    workload: ShiftingWorkload, rings: dict[int, AdaptiveRing], fixed: dict[int, float]
) -> tuple[float, dict[int, int]]:
    """The clairvoyant schedule: (throughput, {step: learner ranks}).

    It knows the time of every phase with every split, and when the lengths change. It pays the same time for a change.
    Of the schedules with the shortest sum of times it is the best simulated one, and at least the best fixed split.
    """
    best = max(fixed, key=fixed.__getitem__)
    found = fixed[best], {0: best}
    for splits in shortest(workload, rings):
        for ahead in (0, workload.schedule.eta + 1):  # prompts are sampled so many batches before they are trained
            plan = {
                max(0, start - ahead * (start > 0)): n for start, n in zip(workload.phase_starts, splits, strict=True)
            }
            throughput = AdaptiveRing(workload, learners=plan[0]).run_all(follow(plan))
            found = max(found, (throughput, plan), key=lambda pair: pair[0])
    return found


def shortest(workload: ShiftingWorkload, rings: dict[int, AdaptiveRing], *, n: int = 2) -> list[tuple[int, ...]]:
    """The n sequences of splits, one for each phase, with the least sum of times."""
    ends = [*workload.phase_starts[1:], workload.n_updates]
    times = {}
    for learners, ring in rings.items():
        at = [0.0, *(ring.update_ends[end - 1] for end in ends)]
        times[learners] = [after - before for before, after in itertools.pairwise(at)]

    def total_s(splits: tuple[int, ...]) -> float:
        n_changes = sum(a != b for a, b in itertools.pairwise(splits))
        return sum(times[split][phase] for phase, split in enumerate(splits)) + n_changes * workload.change_s

    return sorted(itertools.product(rings, repeat=len(ends)), key=total_s)[:n]


def follow(plan: dict[int, int]) -> Wish:
    return lambda step: plan.get(step)


def run_planner(workload: ShiftingWorkload, *, learners: int, every_steps: int) -> PlannerRun:
    """The production planner, from this split on."""
    schedule = workload.schedule
    observer = RingObserver(batch_size=schedule.batch_size, n_samples=schedule.n_samples, slots=schedule.slots)
    planner = SplitPlanner(
        PlannerRules(
            every_steps=every_steps,
            total_steps=workload.n_updates,
            eta=schedule.eta,
            generators_at={learners: workload.n_ranks - learners for learners in workload.splits},
            slots=schedule.slots,
            change_s=workload.change_s,
        )
    )
    ring = AdaptiveRing(workload, learners=learners, observer=observer)
    changes = {0: ring.learners}

    def wish(step: int) -> int | None:
        figures = observer.figures
        planner.measured(step, figures, ring.learners, observer.interval_s)
        wanted = planner.decide(step, figures, ring.learners).learners
        if wanted is not None:
            changes[step] = wanted
        return wanted

    return PlannerRun(ring.run_all(wish), changes, ring.mean_lag)

"""Compares, on one workload: every fixed split, a clairvoyant schedule of splits, and the production planner.

The planner runs four times: with a split that adapts, and with eta, the slots, or both beside it.
"""

import itertools
from dataclasses import dataclass, replace
from statistics import fmean

from areal_bus.core.planner.ring_observer import RingObserver
from areal_bus.core.planner.split_planner import OperatingPoint, PlannerRules, SplitPlanner
from areal_lab.adapt.ring import AdaptiveRing, Wish
from areal_lab.adapt.scenario import ShiftingWorkload

EVERY_STEPS = 10


@dataclass(frozen=True, slots=True)
class PlannerRun:
    """One run with the planner."""

    throughput: float  # trained tokens a second
    changes: dict[int, int]  # step -> learner ranks, as the planner chose them
    mean_lag: float  # versions, over trained tokens
    lease_s: float  # mean time from the lease of a sample to its end
    mean_eta: float  # in force, over updates
    mean_slots: float  # in force, over updates


@dataclass(frozen=True, slots=True)
class Comparison:
    """Throughputs in trained tokens a second."""

    workload: ShiftingWorkload
    fixed: dict[int, float]  # learner ranks -> throughput
    clairvoyant: float
    plan: dict[int, int]  # step -> learner ranks, of the clairvoyant schedule
    adaptive: float
    changes: dict[int, int]  # step -> learner ranks, as the planner chose them
    runs: dict[str, PlannerRun]  # by what adapts: "split" (the planner above), "eta", "slots", "both" beside the split

    @property
    def best_fixed(self) -> int:
        """Learner ranks of the best fixed split."""
        return max(self.fixed, key=self.fixed.__getitem__)

    @property
    def of_clairvoyant(self) -> float:
        return self.adaptive / self.clairvoyant

    @property
    def over_best_fixed(self) -> float:
        return self.adaptive / self.fixed[self.best_fixed] - 1


def compare(workload: ShiftingWorkload, *, every_steps: int = EVERY_STEPS) -> Comparison:
    """Simulate the workload with each."""
    rings = {learners: AdaptiveRing(workload, learners=learners) for learners in workload.plausible_splits}
    fixed = {learners: ring.run_all(stay) for learners, ring in rings.items()}
    clairvoyant, plan = best_schedule(workload, rings, fixed)
    first, group = first_split(workload, rings), workload.schedule.n_samples
    least = {"split": (None, None), "eta": (1, None), "slots": (None, group), "both": (1, group)}
    runs = {
        name: run_planner(workload, learners=first, every_steps=every_steps, eta_min=eta_min, slots_min=slots_min)
        for name, (eta_min, slots_min) in least.items()
    }
    return Comparison(workload, fixed, clairvoyant, plan, runs["split"].throughput, runs["split"].changes, runs)


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


def run_planner(
    workload: ShiftingWorkload,
    *,
    learners: int,
    every_steps: int,
    eta_min: int | None = None,
    slots_min: int | None = None,
) -> PlannerRun:
    """The production planner, from this split on. `eta_min`, `slots_min`: None where that does not adapt."""
    schedule = workload.schedule
    observer = RingObserver(batch_size=schedule.batch_size, n_samples=schedule.n_samples, slots=schedule.slots)
    planner = SplitPlanner(
        PlannerRules(
            every_steps=every_steps,
            total_steps=workload.n_updates,
            eta=schedule.eta,
            generators_at={learners: workload.n_ranks - learners for learners in workload.splits},
            slots=schedule.slots,
            eta_min=eta_min,
            slots_min=slots_min,
            change_s=workload.change_s,
        )
    )
    ring = AdaptiveRing(workload, learners=learners, observer=observer)
    changes, in_force = {0: ring.learners}, list[tuple[int, int]]()

    def wish(step: int) -> int | None:
        figures = observer.figures
        planner.measured(step, figures, ring.learners, observer.interval_s)
        eta, generators = ring.gate.eta_in_force, workload.n_ranks - ring.learners
        now = OperatingPoint(ring.learners, generators, eta, ring.slots, observer.wait_share)
        now = replace(now, eta=planner.choose_eta(step, figures, now))
        now = replace(now, slots=planner.choose_slots(step, figures, now))
        ring.gate.set_eta(now.eta)
        ring.set_slots(now.slots)
        in_force.append((now.eta, now.slots))
        wanted = planner.decide(step, figures, ring.learners)
        if wanted is None:
            return None
        changes[step] = wanted.learners
        return wanted.learners

    throughput = ring.run_all(wish)
    mean_eta, mean_slots = (fmean(values) for values in zip(*in_force, strict=True))
    return PlannerRun(throughput, changes, ring.mean_lag, ring.lease_s / ring.n_sampled, mean_eta, mean_slots)

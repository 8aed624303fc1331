"""Drawn workloads whose lengths double, and later fall to half of what they were at first."""

import random
from bisect import bisect_right
from dataclasses import dataclass

from areal_bus.core.parts.staleness import StalenessPolicy
from areal_lab.ring.workload import LengthLaw, SpeedLaw
from areal_lab.simulate.schedule import Schedule

PHASES = (1.0, 2.0, 0.5)  # factors of the lengths
N_UPDATES = 240
PLAUSIBLE = 0.8  # of the best upper bound of a phase: splits that reach it are simulated
MAX_FACTOR = 8  # the limit of an answer, in medians of the first phase


@dataclass(frozen=True, slots=True)
class ShiftingWorkload:
    """One drawn workload: a ring of `n_ranks` ranks, whose lengths change at the steps `phase_starts`.

    A decode step slows down with the contexts of the live samples, because it reads their KV caches. So long answers
    need more generators.
    """

    seed: int
    n_ranks: int
    n_updates: int
    phase_starts: tuple[int, ...]  # first step of each phase
    schedule: Schedule  # n_generators and train_tokens_per_s are those of one rank
    half_context: float  # tokens of context that double what a live sample costs in a decode step
    scaling: float  # n learner ranks train n ** scaling times as fast as one
    noise: float  # sigma of the log of the time of each update, and of each generator's speed between two updates
    change_s: float  # from the end of an update until the ring works with another split

    def factor_at(self, step: int) -> float:
        """Factor of the lengths of the prompts of batch `step`."""
        return PHASES[bisect_right(self.phase_starts, step) - 1]

    @property
    def splits(self) -> range:
        """Every number of learner ranks."""
        return range(1, self.n_ranks)

    @property
    def plausible_splits(self) -> list[int]:
        """Splits that may be the best in some phase: their upper bound is near the best one."""
        found: set[int] = set()
        for factor in PHASES:
            bounds = {learners: self.bound(learners, factor) for learners in self.splits}
            found |= {n for n, bound in bounds.items() if bound >= PLAUSIBLE * max(bounds.values())}
        return sorted(found)

    def bound(self, learners: int, factor: float) -> float:
        """Tokens a second of the slower half alone, at lengths with this factor."""
        schedule = self.schedule
        speeds, slots, mean = schedule.speeds, schedule.slots, schedule.lengths.mean(schedule.max_tokens) * factor
        step_s = (slots * (1 + mean / 2 / self.half_context) + speeds.half_slots) / speeds.decode_tokens_per_s
        batch = schedule.batch_size * schedule.n_samples * mean
        train_s = schedule.step_s + batch / (schedule.train_tokens_per_s * learners**self.scaling)
        return float(min((self.n_ranks - learners) * slots / step_s, batch / train_s))


def draw(seed: int, *, n_updates: int = N_UPDATES) -> ShiftingWorkload:
    """The workload of this seed. Speeds are such that one split or another is the best."""
    rng = random.Random(f"adapt {seed}")
    n_ranks, n_samples, eta = rng.choice((8, 10, 12, 16)), rng.choice((2, 4, 8)), rng.choice((2, 3, 4))
    n_groups = max(4, round(rng.uniform(24, 40) / n_samples))
    lengths = LengthLaw(median=rng.uniform(120, 400), sigma=rng.uniform(0.2, 0.8))
    max_tokens = round(MAX_FACTOR * lengths.median)
    slots = rng.choice((8, 12, 16))
    speeds = SpeedLaw(rng.uniform(1500, 3000), slots * rng.uniform(0.2, 0.5), 1e9, rng.uniform(0.02, 0.1))
    mean = lengths.mean(max_tokens)
    train = speeds.tokens_per_s(slots) * rng.uniform(0.2, 1.0)
    batch_s = n_groups * n_samples * mean / train / (n_ranks / 3)
    schedule = Schedule(
        batch_size=n_groups,
        n_samples=n_samples,
        eta=eta,
        policy=StalenessPolicy.MASK,
        on_update="keep",
        n_generators=n_ranks,
        slots=slots,
        lengths=lengths,
        max_tokens=max_tokens,
        prompt_tokens=0,
        speeds=speeds,
        train_tokens_per_s=train,
        step_s=batch_s * rng.uniform(0.02, 0.1),
        push_s=batch_s * rng.uniform(0.02, 0.1),
        reward_s=batch_s * rng.uniform(0.0, 0.02),
    )
    return ShiftingWorkload(
        seed=seed,
        n_ranks=n_ranks,
        n_updates=n_updates,
        phase_starts=(0, round(n_updates * rng.uniform(0.2, 0.3)), round(n_updates * rng.uniform(0.4, 0.5))),
        schedule=schedule,
        half_context=mean * rng.uniform(0.1, 0.4),
        scaling=rng.uniform(0.9, 1.0),
        noise=rng.uniform(0.02, 0.1),
        change_s=batch_s * rng.uniform(1.0, 3.0),
    )

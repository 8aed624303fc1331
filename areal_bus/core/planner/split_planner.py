"""Decides when a ring changes its split of ranks, from measured figures. Pure: no I/O.

A fluid model of the ring predicts the updates a second of every split. Three limits bound a ring (docs/adapt.md): the
learner, the slots of the generators, and the credits of the gate. By Little's law, credits = updates/s * the time for
which a group holds its credit: it is sampled, scored, waits for its batch, is trained, and its version is published.
`areal_lab/simulate` is the discrete-event model to compare with.

What was measured with a split corrects its prediction. The split changes when another one has been better by
`hysteresis` at three decisions in a row, and the change repays its time: by the gain of the next updates and what was
lost since the other split is better. At most one change in `every_steps` updates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

PATIENCE = 3  # decisions in a row with a gain, before a change
HORIZON = 4  # times every_steps: updates in which a change must repay its time
SETTLES = 3  # updates after a change that are not compared with their prediction, and eta more
KEEPS = 0.9  # weight that the comparison with a prediction keeps at each update
KNOWN = 3.0  # weight from which a split has a correction of its own
SIMILAR = 0.25  # relative difference of the mean length up to which a correction is valid
DOUBT = 0.05  # share by which a prediction is lowered for a split with e times as many learners, or generators
FIRST_CHANGE_S = 10.0  # assumed time of a change, before one is measured


SHARPNESS = 8.0  # of the soft minimum of the limits: random times cost a few per cent where two limits are equal
WAITS_FOR_BATCH = 0.5  # batches that are complete on average while the next batch fills
N_BISECTIONS = 30


@dataclass(frozen=True, slots=True)
class RingFigures:
    """The measured figures of a ring that do not depend on its split or its eta."""

    batch_size: int  # B, groups
    n_samples: float  # of a group; the mean of a mix
    slots: int  # of a generator
    mean_tokens: float  # sampled tokens of a sample
    longest_tokens: float  # of the longest sample of a group, on average
    decode_s: float  # time of a decode step that does not depend on the live samples
    decode_sample_s: float  # time that each live sample adds to a decode step
    train_s: float  # time of an update that does not depend on its tokens
    train_token_s: float  # time of one sampled token on one learner rank
    push_s: float = 0.0  # from the end of an update to the publication of its version
    reward_s: float = 0.0  # from the last sample of a group to its last score

    @property
    def batch_tokens(self) -> float:
        return self.batch_size * self.n_samples * self.mean_tokens

    def step_s(self, n_live: float) -> float:
        """Time of a decode step with `n_live` samples."""
        return self.decode_s + self.decode_sample_s * n_live

    def update_s(self, learners: int) -> float:
        return self.train_s + self.train_token_s * self.batch_tokens / learners


def updates_per_s(ring: RingFigures, *, learners: int, generators: int, eta: int) -> float:
    """Predicted updates a second in the steady state (slots bind at eta > 0). Raises ValueError for an empty side."""
    if learners < 1 or generators < 1:
        raise ValueError(f"a ring needs a learner and a generator; got {learners} and {generators}")
    if eta == 0:
        return 1 / (_synchronous_s(ring, generators) + _after_sampling_s(ring, learners))
    learner = 1 / ring.update_s(learners)
    sampled = _sampled_per_s(ring, generators, ring.slots)
    credits = _credit_limit(ring, learners, generators, eta)
    return float(sum(limit**-SHARPNESS for limit in (learner, sampled, credits)) ** (-1 / SHARPNESS))


def _sampled_per_s(ring: RingFigures, generators: int, n_live: float) -> float:
    """Batches a second that the generators sample, each with `n_live` live samples."""
    return generators * n_live / ring.step_s(n_live) / ring.batch_tokens


def _after_sampling_s(ring: RingFigures, learners: int) -> float:
    """Seconds from the last sample of a batch to the publication of its version."""
    return ring.reward_s + ring.update_s(learners) + ring.push_s


def _credit_limit(ring: RingFigures, learners: int, generators: int, eta: int) -> float:
    """Updates a second that the gate permits: the number of live samples where both sides of Little's law agree."""
    after_s, n_batches = _after_sampling_s(ring, learners), eta + 1 - WAITS_FOR_BATCH
    low, high = 0.0, float(ring.batch_size * ring.n_samples * (eta + 1))  # live samples of one generator
    for _ in range(N_BISECTIONS):
        n_live = (low + high) / 2
        permitted = n_batches / (ring.longest_tokens * ring.step_s(n_live) + after_s)
        if _sampled_per_s(ring, generators, n_live) < permitted:
            low = n_live
        else:
            high = n_live
    return n_batches / (ring.longest_tokens * ring.step_s(low) + after_s)


def _synchronous_s(ring: RingFigures, generators: int) -> float:
    """eta = 0: seconds to sample a whole batch from idle generators. Every share ends with its longest sample."""
    n_samples = ring.batch_size * ring.n_samples / generators
    waves_tokens = max(0.0, n_samples - ring.slots) / ring.slots * ring.mean_tokens  # before the last wave begins
    n_steps = waves_tokens + ring.longest_tokens
    return n_steps * ring.decode_s + n_samples * ring.mean_tokens * ring.decode_sample_s


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """What the settings allow."""

    every_steps: int  # updates between two changes
    total_steps: int
    eta: int
    generators_at: Mapping[int, int]  # learner ranks -> generators, of each split that may be chosen
    slots: int = 32  # of a generator
    hysteresis: float = 0.03  # smallest relative gain of a change
    change_s: float = FIRST_CHANGE_S  # assumed time of a change, until one is measured


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows after an update."""

    learners: int | None = None  # ranks of the split to change to; None: the split stays
    predicted: Mapping[int, float] = field(default_factory=dict)  # learner ranks -> updates a second, where it changes


STAY = Decision()


@dataclass(slots=True)
class Correction:
    """Predicted over measured seconds of the updates with one split; old ones lose weight."""

    predicted_s: float = 0.0
    measured_s: float = 0.0
    weight: float = 0.0
    mean_tokens: float = 0.0  # of a sample, when it was measured last

    def add(self, predicted_s: float, measured_s: float, mean_tokens: float) -> None:
        if not self.is_valid(mean_tokens):
            self.predicted_s = self.measured_s = self.weight = 0.0
        self.mean_tokens = mean_tokens
        self.predicted_s = self.predicted_s * KEEPS + predicted_s
        self.measured_s = self.measured_s * KEEPS + measured_s
        self.weight = self.weight * KEEPS + 1

    def is_valid(self, mean_tokens: float) -> bool:
        """Whether it was measured at about this mean length."""
        return abs(mean_tokens - self.mean_tokens) <= SIMILAR * self.mean_tokens

    def factor(self, mean_tokens: float) -> float | None:
        """Of the predicted throughput; None while too little is known."""
        is_known = self.weight >= KNOWN and self.is_valid(mean_tokens)
        return self.predicted_s / self.measured_s if is_known else None


class SplitPlanner:
    """Call `measured` and `decide` after an update, and `changed` after a change."""

    def __init__(self, rules: PlannerRules, *, last_change: int = 0) -> None:
        """`last_change`: update of the last change. Raises ValueError for rules without a learner or generator."""
        if rules.every_steps < 1 or any(learners < 1 or n < 1 for learners, n in rules.generators_at.items()):
            raise ValueError(f"every split needs a learner and a generator, every_steps >= 1; got {rules}")
        self.rules = rules
        self.change_s = rules.change_s
        self._last_change = last_change
        self._n_better = 0  # decisions in a row with a better split
        self._lost_s = 0.0  # by them, against that split
        self._corrections: dict[int, Correction] = {}  # by learner ranks

    def measured(self, step: int, figures: RingFigures | None, learners: int, interval_s: float | None) -> None:
        """Update `step` came so long after the one before, with this split."""
        is_settled = step - self._last_change > SETTLES + self.rules.eta
        is_known = learners in self.rules.generators_at
        if figures is not None and interval_s and is_settled and is_known:
            correction = self._corrections.setdefault(learners, Correction())
            correction.add(1 / self._predict(figures, learners), interval_s, figures.mean_tokens)

    def decide(self, step: int, figures: RingFigures | None, learners: int) -> Decision:
        """Whether the split of so many learner ranks changes after update `step`, and to which."""
        rules = self.rules
        if figures is None or learners not in rules.generators_at or step - self._last_change < rules.every_steps:
            return STAY
        predicted = self.predictions(figures, learners)
        doubted = {n: self._doubted(n, speed, learners) for n, speed in predicted.items()}
        best, now = max(doubted, key=doubted.__getitem__), predicted[learners]
        if doubted[best] < (1 + rules.hysteresis) * now:
            self._n_better, self._lost_s = 0, 0.0
            return STAY
        saved_s, n_left = 1 / now - 1 / predicted[best], rules.total_steps - step
        self._n_better += 1
        self._lost_s += saved_s
        repaid_s = min(n_left * saved_s, HORIZON * rules.every_steps * saved_s + self._lost_s)
        if self._n_better < PATIENCE or repaid_s <= self.change_s:
            return STAY
        self._n_better, self._lost_s, self._last_change = 0, 0.0, step
        return Decision(best, predicted)

    def changed(self, step: int, seconds: float) -> None:
        """A change of the split is over; it took so long."""
        self._last_change = max(self._last_change, step)
        self.change_s = seconds

    def predictions(self, figures: RingFigures, learners: int) -> dict[int, float]:
        """Learner ranks -> updates a second of every split, ascending. `learners` now: its correction holds for all."""
        factors = {n: found.factor(figures.mean_tokens) for n, found in self._corrections.items()}
        of_now = factors.get(learners) or 1.0
        splits = sorted(self.rules.generators_at)
        return {n: self._predict(figures, n) * (factors.get(n) or of_now) for n in splits}

    def _doubted(self, split: int, speed: float, learners: int) -> float:
        """The prediction less its likely error, which grows with the distance from the split of now."""
        generators_at = self.rules.generators_at
        ratios = split / learners, generators_at[split] / generators_at[learners]
        return speed * (1 - min(0.5, DOUBT * sum(abs(math.log(ratio)) for ratio in ratios)))

    def _predict(self, figures: RingFigures, learners: int) -> float:
        """Updates a second with this number of learner ranks, by the model alone."""
        generators = self.rules.generators_at[learners]
        return updates_per_s(figures, learners=learners, generators=generators, eta=self.rules.eta)

"""Decides when a ring changes its split of ranks, its eta and its slots, from measured figures. Pure: no I/O.

The model of the ring (`ring_model.py`) predicts the updates a second of every split. What was measured with a split
corrects its prediction. The split changes when another one has been better by `hysteresis` at three decisions in a row,
and the change repays its time: by the gain of the next updates and what was lost since the other split is better. At
most one change in `every_steps` updates.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from areal_bus.core.planner.ring_model import RingFigures, smallest_good, updates_per_s

PATIENCE = 3  # decisions in a row with a gain, before a change
HORIZON = 4  # times every_steps: updates in which a change must repay its time
GOOD_SHARE = 0.98  # of the best predicted throughput, that a smaller eta keeps, and fewer slots
RAISED_BELOW = 0.97  # of it, where eta, or the slots, grow again
FALLS_BELOW = 0.03  # part of the time that the learners wait beyond the prediction, up to which eta or the slots fall
GROWS_ABOVE = 0.08  # of it, above which they grow, whatever is predicted for them
SLOTS_STEP = 4  # the slots change by at most this part of them at a time, or by one group
N_CHOICES = 64  # numbers of slots that are compared, at most
SETTLES = 3  # updates after a change that are not compared with their prediction, and eta more
KEEPS = 0.9  # weight that the comparison with a prediction keeps at each update
KNOWN = 3.0  # weight from which a split has a correction of its own
SIMILAR = 0.25  # relative difference of the mean length up to which a correction is valid
DOUBT = 0.05  # share by which a prediction is lowered for a split with e times as many learners, or generators
FIRST_CHANGE_S = 10.0  # assumed time of a change, before one is measured


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """What the settings allow."""

    every_steps: int  # updates between two changes
    total_steps: int
    eta: int  # the largest that is allowed
    generators_at: Mapping[int, int]  # learner ranks -> generators, of each split that may be chosen
    slots: int = 32  # of a generator
    eta_min: int | None = None  # None: eta is fixed
    slots_min: int | None = None  # None: all slots are in force
    hysteresis: float = 0.03  # smallest relative gain of a change
    change_s: float = FIRST_CHANGE_S  # assumed time of a change, until one is measured


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """How a ring works now: its split, and the eta and the slots in force."""

    learners: int
    generators: int
    eta: int
    slots: int  # of a generator
    wait_share: float = 0.0  # measured part of the time in which the learners wait for a batch

    def updates_per_s(self, figures: RingFigures) -> float:
        """The predicted throughput."""
        return updates_per_s(
            figures, learners=self.learners, generators=self.generators, eta=self.eta, slots=self.slots
        )

    def surprise(self, figures: RingFigures) -> float:
        """How much more of their time the learners wait than is predicted."""
        return self.wait_share - (1 - self.updates_per_s(figures) * figures.update_s(self.learners))


@dataclass(frozen=True, slots=True)
class SplitPrediction:
    """A split and its predicted throughput."""

    learners: int
    updates_per_s: float


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
    """Call `measured`, `decide`, `choose_eta` and `choose_slots` after an update, and `changed` after a change."""

    def __init__(self, rules: PlannerRules, *, last_change: int = 0) -> None:
        """`last_change`: update after which the split changed last.

        Raises ValueError for rules that permit a ring without a learner or a generator.
        """
        if rules.every_steps < 1 or any(learners < 1 or n < 1 for learners, n in rules.generators_at.items()):
            raise ValueError(f"every split needs a learner and a generator, every_steps >= 1; got {rules}")
        self.rules = rules
        self.change_s = rules.change_s
        self._last_change = last_change
        self._n_better = 0  # decisions in a row with a better split
        self._lost_s = 0.0  # by them, against that split
        self._last_eta = self._last_slots = 0  # update after which eta, and the slots, changed last
        self._corrections: dict[int, Correction] = {}  # by learner ranks

    def measured(self, step: int, figures: RingFigures | None, learners: int, interval_s: float | None) -> None:
        """Update `step` came so long after the one before, with this split."""
        is_settled = step - self._last_change > SETTLES + self.rules.eta
        is_known = learners in self.rules.generators_at
        if figures is not None and interval_s and is_settled and is_known:
            correction = self._corrections.setdefault(learners, Correction())
            correction.add(1 / self._predict(figures, learners), interval_s, figures.mean_tokens)

    def decide(self, step: int, figures: RingFigures | None, learners: int) -> SplitPrediction | None:
        """The split to change to after update `step`; None: stay at `learners`."""
        rules = self.rules
        if figures is None or learners not in rules.generators_at or step - self._last_change < rules.every_steps:
            return None
        predictions = self.predictions(figures, learners)
        best = max(predictions, key=lambda prediction: self._doubted(prediction, learners))
        now = next(found.updates_per_s for found in predictions if found.learners == learners)
        if self._doubted(best, learners) < (1 + rules.hysteresis) * now:
            self._n_better, self._lost_s = 0, 0.0
            return None
        saved_s, n_left = 1 / now - 1 / best.updates_per_s, rules.total_steps - step
        self._n_better += 1
        self._lost_s += saved_s
        repaid_s = min(n_left * saved_s, HORIZON * rules.every_steps * saved_s + self._lost_s)
        if self._n_better < PATIENCE or repaid_s <= self.change_s:
            return None
        self._n_better, self._lost_s, self._last_change = 0, 0.0, step
        return best

    def changed(self, step: int, seconds: float) -> None:
        """A change of the split is over; it took so long."""
        self._last_change = max(self._last_change, step)
        self.change_s = seconds

    def choose_eta(self, step: int, figures: RingFigures | None, now: OperatingPoint) -> int:
        """The eta from update `step` on: the smallest that is allowed with nearly the best throughput of these slots.

        It changes by one at a time, at most once in `every_steps` updates.
        """
        rules = self.rules
        if rules.eta_min is None or figures is None or step - self._last_eta < rules.every_steps:
            return now.eta
        choices = (replace(now, eta=eta) for eta in range(rules.eta_min, rules.eta + 1))
        predicted = {choice.eta: choice.updates_per_s(figures) for choice in choices}
        good = _good(predicted, now.eta, now.surprise(figures))
        if good == now.eta:
            return now.eta
        self._last_eta = step
        return now.eta + (1 if good > now.eta else -1)

    def choose_slots(self, step: int, figures: RingFigures | None, now: OperatingPoint) -> int:
        """The slots in force from update `step` on: the fewest with nearly the best throughput of this eta.

        They change by a quarter of all slots at a time, or by a group if it is larger. They fall at most once in
        `every_steps` updates, and grow whenever they are too few.
        """
        rules = self.rules
        if rules.slots_min is None or figures is None:
            return now.slots
        choices = (replace(now, slots=slots) for slots in _slot_choices(rules.slots_min, rules.slots))
        predicted = {choice.slots: choice.updates_per_s(figures) for choice in choices}
        good = _good(predicted, now.slots, now.surprise(figures))
        if good == now.slots or (good < now.slots and step - self._last_slots < rules.every_steps):
            return now.slots
        self._last_slots = step
        most = max(figures.n_samples, rules.slots // SLOTS_STEP)
        return max(now.slots - most, min(now.slots + most, good))

    def predictions(self, figures: RingFigures, learners: int) -> list[SplitPrediction]:
        """Every split with its throughput, by learner ranks; `learners`: those of now.

        A split that was not measured has the correction of the split of now.
        """
        factors = {n: found.factor(figures.mean_tokens) for n, found in self._corrections.items()}
        of_now = factors.get(learners) or 1.0
        return [
            SplitPrediction(n, self._predict(figures, n) * (factors.get(n) or of_now))
            for n in sorted(self.rules.generators_at)
        ]

    def _doubted(self, prediction: SplitPrediction, learners: int) -> float:
        """The prediction less its likely error, which grows with the distance from the split of now."""
        generators_at = self.rules.generators_at
        ratios = prediction.learners / learners, generators_at[prediction.learners] / generators_at[learners]
        return prediction.updates_per_s * (1 - min(0.5, DOUBT * sum(abs(math.log(ratio)) for ratio in ratios)))

    def _predict(self, figures: RingFigures, learners: int) -> float:
        """Updates a second with this number of learner ranks, by the model alone."""
        generators = self.rules.generators_at[learners]
        return updates_per_s(figures, learners=learners, generators=generators, eta=self.rules.eta)


def _good(predicted: Mapping[int, float], now: int, surprise: float) -> int:
    """The smallest value that keeps GOOD_SHARE; one above `now` only where `now` keeps less than RAISED_BELOW.

    Learners that wait longer than predicted show that the prediction is too high: then it does not fall, or grows.
    """
    if surprise > GROWS_ABOVE:
        return max(predicted)
    good = smallest_good(predicted, GOOD_SHARE)
    if good <= now:
        return good if surprise <= FALLS_BELOW else now
    return max(now, smallest_good(predicted, RAISED_BELOW))


def _slot_choices(least: int, slots: int) -> Iterable[int]:
    """Numbers of slots to compare: the least, all, and evenly spaced ones between."""
    return sorted({slots, *range(least, slots, -(-slots // N_CHOICES))})

"""Interleaved rounds: each side once a round, a control around each, medians of the ratios."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

from areal_bus.errors import ConfigError
from benchmarks.harness import pace
from benchmarks.harness.protocol import Figures

ROUNDS = 5
STEADY = 1.5  # slowest control of a round over its fastest, at most
OURS = "ours"

Measure = Callable[[], float]  # one measurement: seconds, or any cost (lower is better)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times our cost a side's is: above 1 we are ahead."""

    median: float
    low: float  # the worst round for us
    high: float


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds that count."""

    costs: tuple[Mapping[str, float], ...]  # of each round, by side
    refused: int  # rounds in which the control was not steady
    control: float  # median of the control over all accepted rounds
    unsteady: float  # slowest control over fastest, worst accepted round

    def cost(self, side: str) -> float:
        return median(costs[side] for costs in self.costs)

    def ratio(self, side: str, to: str = OURS) -> Ratio:
        each = self.ratios(side, to)
        return Ratio(median(each), min(each), max(each))

    def ratios(self, side: str, to: str = OURS) -> list[float]:
        """Of each round."""
        return [costs[side] / costs[to] for costs in self.costs]

    def against(self, side: str, name: str = "ratio", *, to: str = OURS) -> Figures:
        """The fields of one comparison: median and spread."""
        ratio = self.ratio(side, to)
        return {
            name: round(ratio.median, 3),
            f"{name}_low": round(ratio.low, 3),
            f"{name}_high": round(ratio.high, 3),
        }

    def figures(self) -> Figures:
        """Figures on the measurement itself: rounds, refused rounds, control."""
        return {
            "rounds": len(self.costs),
            "refused": self.refused,
            "control_ms": round(1e3 * self.control, 3),
            "control_unsteady": round(self.unsteady, 3),
            "load": round(os.getloadavg()[0], 1),
        }


def sure(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95 % confidence, whatever the distribution (order statistics); needs six values."""
    n, k, below = len(values), 0, 0
    while 40 * (below := below + comb(n, k)) <= 1 << n:
        k += 1
    if k == 0:
        raise ValueError(f"five values or fewer say nothing with 95 % confidence: {n}")
    ordered = sorted(values)
    return ordered[k - 1], ordered[n - k]


def interleave(
    sides: Mapping[str, Measure],
    control: Measure,
    *,
    rounds: int = ROUNDS,
    attempts: int | None = None,
    quick: int = pace.QUICK_ROUNDS,
) -> Rounds:
    """Measure every side once a round, in an order that turns round by round, the control before, between and after.

    `quick`: rounds of a quick bench, fewer when its time is over, but two (or all, where more than QUICK_ROUNDS are
    asked for: an interval needs them).

    A round whose control varies more than STEADY is refused. Raises ConfigError when `attempts` (default: five times
    as many) were not enough for `rounds` that count: figures of a machine that swings are not given.
    """
    names = list(sides)
    kept: list[Mapping[str, float]] = []
    controls: list[list[float]] = []
    refused = 0
    rounds = pace.of(rounds, min(quick, rounds))
    least = rounds if quick > pace.QUICK_ROUNDS else min(2, rounds)
    attempts = 5 * rounds if attempts is None else attempts
    began = time.monotonic()
    for attempt in range(attempts):
        if len(kept) == rounds or (len(kept) >= least and pace.is_late()):
            break
        pace.say(len(kept) + 1, rounds, "round", time.monotonic() - began)
        turn = attempt % len(names)
        seen = [control()]
        costs: dict[str, float] = {}
        for name in names[turn:] + names[:turn]:
            costs[name] = sides[name]()
            seen.append(control())
        if max(seen) > STEADY * min(seen):
            refused += 1
        else:
            kept.append(costs)
            controls.append(seen)
    if len(kept) < pace.of(rounds, least):
        raise ConfigError(
            f"{rounds} rounds with a control steady within {STEADY:g}x are needed; {len(kept)} of {attempts} were: "
            "run the bench on a quieter machine"
        )
    middle = median(x for seen in controls for x in seen)
    return Rounds(tuple(kept), refused, middle, max(max(seen) / min(seen) for seen in controls))

"""Scales, ticks and numbers of a chart."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

WIDTH, HEIGHT = 360, 170  # of a chart, in units of its viewBox
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 10, 26  # nine characters fit left of the axis


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale from values to units of the viewBox."""

    low: float
    high: float
    begin: float  # place of `low`
    end: float  # place of `high`

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.begin + self.end) / 2
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self, n: int) -> list[float]:
        """About n round values within the axis."""
        step = round_step((self.high - self.low) / n) if self.high > self.low else 0.0
        if step == 0.0:
            return [self.low]
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def x_axis(values: Sequence[float]) -> Axis:
    return Axis(min(values), max(values), LEFT, WIDTH - RIGHT)


def y_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """With some room above and below, but not below 0 for values that never are."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    least = low if low == 0 else max(low - room, 0.0) if low > 0 else low - room
    return Axis(least, high + room, HEIGHT - BOTTOM, TOP)


def number(value: float) -> str:
    """A short number for a tick or a table: 0.25, 1,500, 12k, 3e-07."""
    size = abs(value)
    if size >= 1e12 or (0 < size < 1e-3):
        return f"{value:.2g}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:,.0f}" if size >= 1e3 else f"{value:.3g}"


def place(value: float) -> str:
    """A coordinate with one decimal."""
    return f"{value:.1f}".removesuffix(".0")

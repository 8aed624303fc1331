"""How much a bench measures, all or --quick, and what it says of its progress on standard error."""

import sys
import time
from dataclasses import dataclass
from typing import TypeVar

from actors.head.console import clock

T = TypeVar("T")
QUICK_ROUNDS = 3  # of interleaved measurements
QUICK_S = 120.0  # of measuring in all interleaved parts of a quick bench; starts and warm-up come to it


@dataclass
class _Pace:
    quick: bool = False
    until: float = float("inf")  # monotonic


_pace = _Pace()


def begin(*, quick: bool) -> None:
    """Called once, before the bench: whether it is a quick one."""
    _pace.quick = quick
    _pace.until = time.monotonic() + QUICK_S if quick else float("inf")


def of(full: T, quick: T) -> T:
    """The amount to measure."""
    return quick if _pace.quick else full


def is_late() -> bool:
    """Whether a quick bench has used its time: it ends with the rounds that it has, at least two."""
    return time.monotonic() > _pace.until


def say(number: int, n: int, what: str, seconds: float | None = None) -> None:
    """One line of progress. `seconds`: taken by the steps before this one, from which the time left follows."""
    left = f", about {clock(seconds / (number - 1) * (n - number + 1))} left" if seconds and number > 1 else ""
    print(f"{what} {number} of {n}{left}", file=sys.stderr, flush=True)

"""`python -m areal_lab.simulate.paper`: the planner beside the paper's tables (arXiv 2505.24298).

Two numbers are fitted to three rows of the small set-up (1.5B on eight GPUs, context 8k, 64 prompts x 16 answers): the
ratio of a generator's speed to a learner rank's, and the unit of time. The other three rows are predictions. The same
speeds, with 512 prompts a batch, show how throughput grows from 32 to 512 GPUs.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.process.commands import as_here
from areal_lab.ring.workload import LengthLaw, SpeedLaw
from areal_lab.simulate.outcome import simulate
from areal_lab.simulate.schedule import Schedule
from tools import terminal

PUBLISHED = {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5, 16: 52.0}  # eta -> thousand tokens/s
FITTED = (0, 1, 16)
RATIOS = 0.40, 0.64  # of the decoding limit of a generator to the speed of a learner rank
N_TRIES = 8
GPUS = (32, 64, 128, 256, 512)
GENERATING = 0.75  # share of the devices, as in the paper
ASSUMED = Schedule(
    batch_size=64,
    n_samples=16,
    eta=0,
    policy=StalenessPolicy.MASK,
    on_update="recompute",
    n_generators=6,
    slots=256,
    lengths=LengthLaw(4000, 0.5),
    max_tokens=8192,
    prompt_tokens=200,
    speeds=SpeedLaw(decode_tokens_per_s=1.0, half_slots=32.0, prefill_tokens_per_s=100_000.0, update_s=1.0),
    train_tokens_per_s=2 * 28_000.0,
    step_s=2.0,
    push_s=2.0,
    reward_s=0.0,
)
"""Assumptions, as configs/plan.toml. The unit of time is free: the paper does not give the lengths of answers."""


@dataclass(frozen=True, slots=True)
class PaperFit:
    """The fitted ring."""

    ratio: float
    faster: float  # all speeds, relative to ASSUMED
    simulated: Mapping[int, float]  # eta -> thousand tokens/s

    def error(self, eta: int) -> float:
        """Relative error of one row."""
        return self.simulated[eta] / PUBLISHED[eta] - 1


@dataclass(frozen=True, slots=True)
class Scale:
    """A ring of so many devices."""

    gpus: int
    asynchronous: float  # thousand tokens/s at eta 8
    synchronous: float  # at eta 0


def fit() -> PaperFit:
    """Least squares of the logarithms over FITTED; the other rows are predicted."""
    k_tokens = cache(lambda ratio, eta: throughput(scheduled(ratio, eta)))

    def squares(ratio: float) -> float:
        logs = [math.log(PUBLISHED[eta] / k_tokens(ratio, eta)) for eta in FITTED]
        mean = sum(logs) / len(logs)
        return sum((one - mean) ** 2 for one in logs)

    ratio = smallest(squares, *RATIOS)
    faster = math.exp(sum(math.log(PUBLISHED[eta] / k_tokens(ratio, eta)) for eta in FITTED) / len(FITTED))
    return PaperFit(ratio, faster, {eta: faster * k_tokens(ratio, eta) for eta in PUBLISHED})


def smallest(of: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search for the smallest value between two numbers."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = of(a), of(b)
    for _ in range(N_TRIES - 2):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = of(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = of(b)
    return a if at_a < at_b else b


def scheduled(ratio: float, eta: int) -> Schedule:
    """The small set-up."""
    speed = ratio * ASSUMED.train_tokens_per_s / 2
    return replace(ASSUMED, eta=eta, speeds=replace(ASSUMED.speeds, decode_tokens_per_s=speed))


def throughput(schedule: Schedule) -> float:
    """Thousand tokens/s after the ring has filled."""
    n_settle = 3 + schedule.eta
    return simulate(schedule, n_steps=n_settle + (6 if not schedule.eta else 18), n_settle=n_settle).tokens_per_s / 1e3


def scaling(found: PaperFit) -> list[Scale]:
    """Rings of 32 to 512 devices with 512 prompts a batch, at eta 8 and synchronous."""
    rows = []
    for gpus in GPUS:
        generators = round(GENERATING * gpus)
        large = replace(
            scheduled(found.ratio, 0),
            batch_size=512,
            n_generators=generators,
            train_tokens_per_s=ASSUMED.train_tokens_per_s / 2 * (gpus - generators),
        )
        each = [found.faster * throughput(replace(large, eta=eta)) for eta in (8, 0)]
        rows.append(Scale(gpus, *each))
    return rows


def lines(found: PaperFit, scales: Sequence[Scale]) -> list[str]:
    """The tables."""
    cells = [("eta", "published", "simulated", "error", "")]
    for eta, published in PUBLISHED.items():
        use = "fitted" if eta in FITTED else "predicted"
        cells.append((str(eta), f"{published:.1f}", f"{found.simulated[eta]:.1f}", f"{found.error(eta):+.1%}", use))
    heading = "1.5B on eight GPUs (2 learn, 6 generate), thousand tokens/s:"
    printed = [heading, "", *terminal.table(cells, right=frozenset(range(4)))]
    if scales:
        first = scales[0].asynchronous / scales[0].gpus
        cells = [("GPUs", "eta 8", "of linear", "eta 0", "of eta 8")]
        for one in scales:
            cells.append((
                str(one.gpus), f"{one.asynchronous:,.0f}", f"{one.asynchronous / one.gpus / first:.0%}",
                f"{one.synchronous:,.0f}", f"{one.synchronous / one.asynchronous:.0%}",
            ))  # fmt: skip
        printed += ["", "512 prompts x 16 answers a batch:", "", *terminal.table(cells, right=frozenset(range(5)))]
    return printed


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        as_here("python -m areal_lab.simulate.paper"), description="Fit the planner to three rows of the paper's table."
    )
    p.add_argument("--scaling", action="store_true", help="also 32 to 512 GPUs (a minute)")
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    args = p.parse_args(argv)
    found = fit()
    scales = scaling(found) if args.scaling else []
    if args.json:
        print(json.dumps(asdict(found) | {"scaling": [asdict(one) for one in scales]}))
    else:
        print("\n".join(lines(found, scales)))
    return 0


if __name__ == "__main__":
    terminal.end(main)

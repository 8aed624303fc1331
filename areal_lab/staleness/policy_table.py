"""Measures the cost of each policy in simulated rings: ages, speed, masked and wasted work, bias against long samples.

The world: 4 generators of 16 slots, batches of 8 groups of 4 samples, lengths with a mean of about 60 seconds,
updates of 20 s on average, pushes of 2 s, no faults. Lengths are drawn anew for each sample, for a row issued again,
too.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy, runs_under
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Scenario, ScenarioLengths, Tail

ETAS = (0, 1, 2, 4, 8, 16)
TAILS = {
    "log-normal 0.5": ScenarioLengths(Tail.LOG_NORMAL, 53.0, 0.5, 2400),
    "log-normal 1": ScenarioLengths(Tail.LOG_NORMAL, 36.5, 1.0, 2400),
    "Pareto 1.5": ScenarioLengths(Tail.PARETO, 22.5, 1.5, 2400),
}
WAYS = {  # Scenario.interrupts, Scenario.finishes
    "with interruption": (True, False),
    "without interruption": (False, False),
    "several versions": (True, True),
}
HEADER = ("policy", "eta", "age", "max", "lag", "max", "speed", "masked", "wasted", "long")


@dataclass(slots=True)
class Cell:
    """Sums over the runs of one cell."""

    seconds: float = 0.0
    updates: int = 0
    ages: list[int] = field(default_factory=list)  # c - version of the first token, a trajectory
    lags: dict[int, int] = field(default_factory=dict)  # c - version -> trained tokens
    tokens: int = 0  # in batches
    trained: int = 0
    dropped: int = 0
    trained_of_long: int = 0  # of samples in the longest tenth

    def row(self, share_of_long: float) -> list[str]:
        """Figures in the order of HEADER, without policy and eta."""
        n_trained = max(self.trained, 1)
        lag = sum(lag * n for lag, n in self.lags.items()) / n_trained
        return [
            f"{sum(self.ages) / len(self.ages):.2f}",
            f"{max(self.ages)}",
            f"{lag:.2f}",
            f"{max(self.lags, default=0)}",
            f"{3600 * self.updates / self.seconds:.0f}",
            f"{1 - self.trained / self.tokens:.1%}",
            f"{self.dropped / (self.dropped + self.tokens):.1%}",
            f"{self.trained_of_long / n_trained / share_of_long:.2f}",
        ]


def run(*, n_steps: int, n_seeds: int) -> int:
    for line in lines(n_steps, n_seeds):
        print(line, flush=True)
    return 0


def lines(n_steps: int, n_seeds: int) -> Iterator[str]:
    """Tables in the form of docs/staleness.md, one a tail and way of taking weights."""
    for title, way in WAYS.items():
        for name, lengths in TAILS.items():
            threshold, share = longest_tenth(lengths)
            yield f"\n**{name}, {title}**\n"
            rows = [
                [policy, str(eta), *cell(policy, eta, lengths, way, n_steps, n_seeds, threshold).row(share)]
                for policy in StalenessPolicy
                for eta in ETAS
            ]
            widths = [max(len(cell) for cell in column) for column in zip(HEADER, *rows, strict=True)]
            yield markdown(HEADER, widths)
            yield markdown(["-" * width for width in widths], widths)
            yield from (markdown(row, widths) for row in rows)


def markdown(cells: list[str] | tuple[str, ...], widths: list[int]) -> str:
    return "| " + " | ".join(text.rjust(width) for text, width in zip(cells, widths, strict=True)) + " |"


def longest_tenth(lengths: ScenarioLengths) -> tuple[int, float]:
    """The length that a tenth of all samples reach, and the share of all tokens that is theirs."""
    rng = random.Random(1)
    drawn = sorted(lengths.draw(rng) for _ in range(100_000))
    threshold = drawn[len(drawn) * 9 // 10]
    return threshold, sum(n for n in drawn if n >= threshold) / sum(drawn)


def world(
    policy: StalenessPolicy, eta: int, lengths: ScenarioLengths, way: tuple[bool, bool], n_steps: int, seed: int
) -> Scenario:
    return Scenario(
        seed=seed,
        policy=policy,
        batch_size=8,
        eta=eta,
        n_samples=4,
        total_steps=n_steps,
        n_generators=4,
        capacity=16,
        lengths=lengths,
        update_s=20.0,
        push_s=2.0,
        heartbeat_s=1e4,
        silent_s=1e6,
        push_timeout_s=1e6,
        resend_s=1e4,
        patience_s=1e7,
        interrupts=way[0],
        finishes=way[1],
    )


def cell(
    policy: StalenessPolicy,
    eta: int,
    lengths: ScenarioLengths,
    way: tuple[bool, bool],
    n_steps: int,
    n_seeds: int,
    threshold: int,
) -> Cell:
    """Runs of one cell; the first tenth of each is left out."""
    found = Cell()
    for seed in range(n_seeds):
        ring = Ring(world(policy, eta, lengths, way, n_steps, seed))
        ring.records = []
        ring.run()
        measure(found, ring, threshold, first=n_steps // 10)
    return found


def measure(found: Cell, ring: Ring, threshold: int, *, first: int) -> None:
    scenario = ring.scenario
    began = ended = 0.0
    step = -1
    for at_s, record in ring.records or ():
        fields = record.fields
        if record.event is Event.BATCH:
            step = fields["step"]
            began, ended = (at_s if step == first else began), at_s
        elif step < first:
            continue
        elif record.event is Event.REFUND and fields["reason"] == "too_old":
            found.dropped += fields["n_tokens_dropped"]
        elif record.event is Event.TRAJECTORY:
            flat, clock = fields["versions"], fields["clock"]
            spans = list(zip(flat[::2], flat[1::2], strict=True))
            n_trained = 0
            for (version, _), (n, trained) in zip(
                spans, runs_under(scenario.policy, spans, clock, scenario.eta), strict=True
            ):
                if trained:
                    n_trained += n
                    found.lags[clock - version] = found.lags.get(clock - version, 0) + n
            found.ages.append(clock - flat[0])
            found.tokens += fields["n_tokens"]
            found.trained += n_trained
            found.trained_of_long += n_trained if fields["n_tokens"] >= threshold else 0
    found.updates += step - first
    found.seconds += ended - began

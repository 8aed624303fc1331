"""What a ring in virtual time comes to: throughput, waits and ages, from one update on; knows no event."""

from dataclasses import dataclass

from tools.simulate.ring import RingModel
from tools.simulate.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a ring comes to, from one update on."""

    tokens_per_s: float  # consumed by updates, masked ones included
    learner_waits: float  # share of the time
    generators_wait: float  # share of the time without a live sample
    slots_used: float  # share
    lag_mean: float  # of trained tokens
    lag_max: int
    masked: float  # share of the consumed tokens
    dropped: float  # share of the complete samples' tokens

    @property
    def trained_per_s(self) -> float:
        """Tokens that enter a loss."""
        return self.tokens_per_s * (1 - self.masked)


def play(schedule: Schedule, *, n_steps: int, n_settle: int, seed: int = 0) -> Outcome:
    """Of the updates after the first `n_settle`. Raises ValueError unless there are any."""
    if not 0 <= n_settle < n_steps:
        raise ValueError(f"updates are left to measure: {n_settle} of {n_steps} settle")
    ring = RingModel(schedule, seed=seed)
    ring.run(n_settle)
    began, idle_s, live_s, dropped = ring.now, *waiting(ring), ring.count.dropped
    ring.run(n_steps)
    seconds = ring.now - began
    idle_s, live_s = (after - before for after, before in zip(waiting(ring), (idle_s, live_s), strict=True))
    measured = ring.batches[n_settle:]
    n_tokens, n_masked = sum(b.n_tokens for b in measured), sum(b.n_masked for b in measured)
    dropped, of_all = ring.count.dropped - dropped, seconds * schedule.n_generators
    return Outcome(
        tokens_per_s=n_tokens / seconds,
        learner_waits=max(0.0, 1 - sum(b.ended - max(b.began, began) for b in measured) / seconds),
        generators_wait=idle_s / of_all,
        slots_used=live_s / of_all / schedule.slots,
        lag_mean=sum(b.n_lag for b in measured) / max(1, n_tokens - n_masked),
        lag_max=max(b.max_lag for b in measured),
        masked=n_masked / n_tokens,
        dropped=dropped / (dropped + n_tokens),
    )


def settled(schedule: Schedule, *, n_steps: int, seed: int = 0) -> Outcome:
    """Of so many updates, after those in which the ring fills."""
    n_settle = 8 + 2 * schedule.eta
    return play(schedule, n_steps=n_settle + n_steps, n_settle=n_settle, seed=seed)


def waiting(ring: RingModel) -> tuple[float, float]:
    """(seconds without a sample, samples times seconds) of all generators so far."""
    for generator in ring.generators:
        generator.advance(ring.now)
    return sum(g.idle_s for g in ring.generators), sum(g.live_s for g in ring.generators)

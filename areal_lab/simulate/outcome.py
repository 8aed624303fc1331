"""Runs a ring in virtual time and measures throughput, waits and lag after a warm-up."""

from dataclasses import dataclass

from areal_lab.simulate.ring import RingModel
from areal_lab.simulate.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a ring after its warm-up."""

    tokens_per_s: float  # consumed by updates, masked tokens included
    learner_waits: float  # share of the time
    generators_wait: float  # share of the time without a live sample
    slots_used: float  # share
    lag_mean: float  # of trained tokens
    lag_max: int
    masked: float  # share of the consumed tokens
    dropped: float  # share of the complete samples' tokens

    @property
    def trained_per_s(self) -> float:
        """Tokens a second that enter the loss."""
        return self.tokens_per_s * (1 - self.masked)


def simulate(schedule: Schedule, *, n_steps: int, n_settle: int, seed: int = 0) -> Outcome:
    """Measure the updates after the first `n_settle`. Raises ValueError if none are left."""
    if not 0 <= n_settle < n_steps:
        raise ValueError(f"updates must be left to measure: {n_settle} of {n_steps} are warm-up")
    ring = RingModel(schedule, seed=seed)
    ring.run(n_settle)
    began, idle_s, live_s, dropped = ring.now, *idle_and_live_s(ring), ring.count.dropped
    ring.run(n_steps)
    seconds = ring.now - began
    idle_s, live_s = (after - before for after, before in zip(idle_and_live_s(ring), (idle_s, live_s), strict=True))
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


def simulate_steady_state(schedule: Schedule, *, n_steps: int, seed: int = 0) -> Outcome:
    """Measure `n_steps` updates after a warm-up in which the ring fills."""
    n_settle = 8 + 2 * schedule.eta
    return simulate(schedule, n_steps=n_settle + n_steps, n_settle=n_settle, seed=seed)


def idle_and_live_s(ring: RingModel) -> tuple[float, float]:
    """(seconds without a sample, samples times seconds) of all generators so far."""
    for generator in ring.generators:
        generator.advance(ring.now)
    return sum(g.idle_s for g in ring.generators), sum(g.live_s for g in ring.generators)

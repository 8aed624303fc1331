"""What happens to samples that are older than eta versions: the four policies and which tokens they train (I2).

It knows no tensors and no ring. The rules by which prompts are admitted and batches taken are the gate's.
"""

from collections.abc import Sequence
from enum import StrEnum

from areal_bus.errors import ImpossibleEvent


class StalenessPolicy(StrEnum):
    """`rollout.staleness_policy`; docs/staleness.md has what each guarantees and what it costs."""

    MASK = "mask"  # tokens older than eta train nothing
    HOLD = "hold"  # the learner waits for whoever would become too old
    DROP = "drop"  # groups that became too old are refunded and their rows issued again
    PAPER = "paper"  # eq. 3 alone: everything is trained, however old


def trained_runs(spans: Sequence[Sequence[int]], clock: int, eta: int) -> list[tuple[int, bool]]:
    """(n_tokens, trained) for each span of versions, in order: trained iff clock - version <= eta.

    `spans` are [[version, n_tokens], ...] over the sampled tokens; `clock` is c, the updates finished when the batch
    was taken. Raises ValueError for spans that no generator can have stamped.
    """
    if eta < 0 or clock < 0:
        raise ValueError(f"clock and eta count from 0: clock {clock}, eta {eta}")
    runs: list[tuple[int, bool]] = []
    before = 0
    for version, n_tokens in spans:
        if n_tokens < 1:
            raise ValueError(f"a span holds at least one token: {n_tokens} at version {version}")
        if not before <= version <= clock:
            raise ValueError(
                f"versions never decrease along a trajectory nor pass the clock: {version} after {before}, "
                f"clock {clock}"
            )
        runs.append((n_tokens, clock - version <= eta))
        before = version
    return runs


def runs_under(policy: StalenessPolicy, spans: Sequence[Sequence[int]], clock: int, eta: int) -> list[tuple[int, bool]]:
    """`trained_runs` as the policy has it: `paper` trains all; under `hold` and `drop` nothing older can occur.

    Raises ImpossibleEvent when it does occur, ValueError for spans that no generator can have stamped.
    """
    runs = trained_runs(spans, clock, eta)
    if policy is StalenessPolicy.PAPER:
        return [(n_tokens, True) for n_tokens, _ in runs]
    if policy is not StalenessPolicy.MASK and not all(trained for _, trained in runs):
        raise ImpossibleEvent(
            f"under {policy} no token of a batch is older than eta = {eta}: version {spans[0][0]} at clock {clock}"
        )
    return runs

"""The four staleness policies, and the rule that decides which tokens are trained (I2). See also `gate.py`."""

from collections.abc import Sequence
from enum import StrEnum

from areal_bus.errors import ImpossibleEvent


class StalenessPolicy(StrEnum):
    """`rollout.staleness_policy`; docs/staleness.md lists the guarantees and the cost of each."""

    MASK = "mask"  # tokens older than eta enter no loss
    HOLD = "hold"  # the learner waits for prompts that would become too old
    DROP = "drop"  # groups that are too old are refunded; their rows are issued again
    PAPER = "paper"  # eq. 3 only: tokens of any age are trained


def trained_runs(spans: Sequence[Sequence[int]], clock: int, eta: int) -> list[tuple[int, bool]]:
    """(n_tokens, trained) for each span of versions, in order: trained iff clock - version <= eta.

    `spans` are [[version, n_tokens], ...] over the sampled tokens; `clock` is c, the updates finished when the batch
    was taken. Raises ValueError for spans that no generator can produce.
    """
    if eta < 0 or clock < 0:
        raise ValueError(f"clock and eta count from 0: clock {clock}, eta {eta}")
    runs: list[tuple[int, bool]] = []
    before = 0
    for version, n_tokens in spans:
        if n_tokens < 1:
            raise ValueError(f"a span holds at least one token: {n_tokens} at version {version}")
        if not before <= version <= clock:
            rule = "versions never decrease along a trajectory nor pass the clock"
            raise ValueError(f"{rule}: {version} after {before}, clock {clock}")
        runs.append((n_tokens, clock - version <= eta))
        before = version
    return runs


def runs_under(policy: StalenessPolicy, spans: Sequence[Sequence[int]], clock: int, eta: int) -> list[tuple[int, bool]]:
    """`trained_runs` under a policy: `paper` trains all tokens; under `hold` and `drop` no token may be older than eta.

    Raises ImpossibleEvent for an older token, ValueError for spans that no generator can produce.
    """
    runs = trained_runs(spans, clock, eta)
    if policy is StalenessPolicy.PAPER:
        return [(n_tokens, True) for n_tokens, _ in runs]
    if policy is not StalenessPolicy.MASK and not all(trained for _, trained in runs):
        rule = f"under {policy} no token of a batch is older than eta = {eta}"
        raise ImpossibleEvent(f"{rule}: version {spans[0][0]} at clock {clock}")
    return runs

"""Recomputes an update's figures from its batch's trajectories, as far as the journal determines them (I12)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.audit.run_settings import RunSettings
from tools.surviving_history import Spans, span_pairs, trained_spans

RELATIVE = 1e-9  # sums over ranks have another order
SHARES = ("truncated_share", "masked_share", "zero_advantage_share", "correct", "completed_accuracy")
NAMES = ("reward", *SHARES, "lag_mean", "lag_max")


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """One trajectory of a batch."""

    uid: int
    sample: int
    reward: float
    finish: str
    n_tokens: int
    n_masked: int
    lags: Spans  # (clock - version, tokens), without masked tokens
    rewards: tuple[tuple[str, float], ...] = ()  # role and reward of each trajectory of an episode with roles

    @property
    def compared(self) -> set[tuple[int, str]]:
        """Group and role of what has an advantage: the sample, or each of its trajectories with roles."""
        return {(self.uid, role) for role, _ in self.rewards or (("", 0.0),)}

    @property
    def n_trained(self) -> int:
        return self.n_tokens - self.n_masked


def read(line: Mapping[str, Any]) -> TrainedSample:
    """A `trajectory` line."""
    spans = trained_spans(span_pairs(line["versions"]), line["n_masked"])
    lags = [(line["clock"] - version, n) for version, n in spans]
    rewards = tuple(zip(line.get("roles", "").split(), line.get("rewards", []), strict=True))
    return TrainedSample(
        line["uid"], line["sample"], line["reward"], line["finish"], line["n_tokens"], line["n_masked"], lags, rewards
    )


def broken(
    line: Mapping[str, Any], batch: Sequence[TrainedSample], judged: Sequence[tuple[bool, str]], setup: RunSettings
) -> list[str]:
    """Figures of an `update` line that its batch contradicts. `judged`: of each answer: right?, and its ending."""
    if not batch or not any(name in line for name in NAMES):
        return []
    n_tokens = sum(one.n_tokens for one in batch)
    expected = {
        "reward": math.fsum(one.reward for one in batch) / len(batch),
        "truncated_share": sum(one.finish == "length" for one in batch) / len(batch),
        "masked_share": sum(one.n_masked for one in batch) / n_tokens if n_tokens else None,
        "correct": sum(is_right for is_right, _ in judged) / len(judged) if judged else None,
    }
    if "completed_accuracy" in line:  # older journals have none
        n_completed = sum(is_right and finish == "stop" for is_right, finish in judged)
        expected["completed_accuracy"] = n_completed / len(judged) if judged else None
    trained = trained_part(batch, setup)
    if trained is None:
        return [*differing(line, expected), *out_of_bounds(line, batch)]
    lags = [pair for one in trained for pair in one.lags]
    n_trained = sum(n for _, n in lags)
    expected |= {
        "zero_advantage_share": 1 - len({uid for uid, _ in with_signal(batch)}) / len({one.uid for one in batch}),
        "n_tokens_trained": n_trained,
        "n_tokens_skipped": n_tokens - n_trained - sum(one.n_masked for one in batch),
        "lag_mean": sum(lag * n for lag, n in lags) / n_trained if n_trained else None,
        "lag_max": max((lag for lag, _ in lags), default=None),
    }
    return differing(line, expected)


def trained_part(batch: Sequence[TrainedSample], setup: RunSettings) -> list[TrainedSample] | None:
    """The trajectories whose tokens enter the loss; None where the journal does not determine them."""
    if setup.trains is None:
        return None
    signal = with_signal(batch)
    chosen = [one for one in batch if setup.trains == "all" or not signal.isdisjoint(one.compared)]
    return [one for one in chosen if not (setup.leaves_truncated_out and one.finish == "length")]


def trained_tokens(batch: Sequence[TrainedSample], figures: Mapping[str, Any], setup: RunSettings) -> list[float]:
    """Tokens of each trajectory in the loss of an update with these figures: equal shares where no more is known."""
    chosen = trained_part(batch, setup)
    in_loss = {(one.uid, one.sample) for one in (batch if chosen is None else chosen)}
    known = [float(one.n_trained) if (one.uid, one.sample) in in_loss else 0.0 for one in batch]
    n_trained = figures.get("n_tokens_trained")
    if n_trained is None or n_trained == sum(known):
        return known
    share = n_trained / (sum(one.n_trained for one in batch) or 1)  # an estimator of which the journal knows less
    return [share * one.n_trained for one in batch]


def with_signal(batch: Sequence[TrainedSample]) -> set[tuple[int, str]]:
    """Groups and roles whose rewards differ."""
    rewards: dict[tuple[int, str], set[float]] = {}
    for one in batch:
        for role, reward in one.rewards or (("", one.reward),):
            rewards.setdefault((one.uid, role), set()).add(reward)
    return {key for key, found in rewards.items() if len(found) > 1}


def differing(line: Mapping[str, Any], expected: Mapping[str, float | None]) -> list[str]:
    """A figure without a value is left out."""
    wrong = {name: value for name, value in expected.items() if not is_same(line.get(name), value)}
    rule = "of an update is that of its batch's lines"
    return [f"{name} {rule}: {value}, not {line.get(name)}" for name, value in wrong.items()]


def out_of_bounds(line: Mapping[str, Any], batch: Sequence[TrainedSample]) -> list[str]:
    """Shares are shares, and a lag is one of the tokens that were not masked."""
    lags = {lag for one in batch for lag, _ in one.lags}
    mean, largest = line.get("lag_mean"), line.get("lag_max")
    found = [f"a share is 0..1: {name} {line[name]}" for name in SHARES if name in line and not 0 <= line[name] <= 1]
    if (mean is None) != (largest is None):
        found.append(f"an update has a mean and a largest lag, or neither: {mean}, {largest}")
    elif mean is not None and not (largest in lags and min(lags) <= mean <= largest):
        found.append(f"lags of an update are those of its batch's tokens: mean {mean}, largest {largest}, {lags}")
    return found


def is_same(one: Any, other: Any) -> bool:
    """Whether two figures are equal but for the order of a sum; NaN equals NaN."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=1e-12)
    return bool(one == other)

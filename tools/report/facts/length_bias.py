"""Length bias: lengths of what is trained against those of all that was sampled, with intervals by the delta method."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, fsum, sqrt

from tools.report.facts.seeds import t_975
from tools.report.facts.token_account import SampleFate

TENTH = 0.9  # samples of at least this quantile of the sampled lengths are the longest tenth


@dataclass(frozen=True, slots=True)
class RatioEstimate:
    """A ratio and its 95 % interval (None with fewer than two groups)."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class LengthBias:
    """One source, or all ("")."""

    source: str
    n_groups: int
    n_sampled: int
    n_trained: int
    mean_sampled: float
    mean_trained: float  # trained tokens of a sample that trained any
    ratio: RatioEstimate
    long_from: int  # tokens
    long_sampled: float  # share of the longest tenth in the sampled tokens
    long_trained: float
    long_ratio: RatioEstimate


def length_biases(samples: Iterable[SampleFate]) -> list[LengthBias]:
    """All sources together, then each of several; only sources of which something is trained."""
    counted = [one for one in samples if one.group is not None]
    sources = sorted({one.source for one in counted if one.source})
    parts = [
        ("", counted),
        *((name, [one for one in counted if one.source == name]) for name in sources[1:] and sources),
    ]
    return [_bias(name, part) for name, part in parts if any(one.n_trained for one in part)]


def _bias(source: str, samples: Sequence[SampleFate]) -> LengthBias:
    lengths = sorted(one.n_tokens for one in samples)
    long_from = lengths[int(len(lengths) * TENTH)]
    groups = dict[object, list[float]]()  # sums of the six columns below
    for one in samples:
        n, is_long = one.n_tokens, one.n_tokens >= long_from
        row = (one.n_trained, one.n_trained > 0, n, 1, one.n_trained * is_long, n * is_long)
        groups[one.group] = [x + y for x, y in zip(groups.get(one.group, [0.0] * 6), row, strict=True)]
    trained, n_trained, sampled, n_sampled, long_trained, long_sampled = map(fsum, zip(*groups.values(), strict=True))
    ratio = estimate([row[:4] for row in groups.values()])
    long_ratio = estimate([(row[4], row[0], row[5], row[2]) for row in groups.values()])
    means, shares = (sampled / n_sampled, trained / n_trained), (long_sampled / sampled, long_trained / trained)
    sizes = (int(n_sampled), int(n_trained))
    return LengthBias(source, len(groups), *sizes, *means, ratio, long_from, *shares, long_ratio)


def estimate(groups: Sequence[Sequence[float]]) -> RatioEstimate:
    """(sum a / sum b) / (sum c / sum d) over groups (a, b, c, d), drawn independently of each other.

    Delta method: a group moves the logarithm by a/A - b/B - c/C + d/D. Student's t.
    """
    sums = [fsum(column) for column in zip(*groups, strict=True)]
    if not all(sums):
        return RatioEstimate(0.0)
    value, n = sums[0] * sums[3] / (sums[1] * sums[2]), len(groups)
    if n < 2:
        return RatioEstimate(value)
    moves = [a / sums[0] - b / sums[1] - c / sums[2] + d / sums[3] for a, b, c, d in groups]
    half = t_975(n - 1) * sqrt(n / (n - 1) * fsum(move * move for move in moves))
    return RatioEstimate(value, value * exp(-half), value * exp(half))

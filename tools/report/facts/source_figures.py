"""Figures of each [[data.source]] of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from tools.report.facts.curves import Curve
from tools.report.facts.run_facts import RunFacts

LAST = 0.2  # of the updates, whose mean is shown


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """One source. The last four are means over the last fifth of its updates; None where the journal has none."""

    source: str
    n_groups: int
    n_samples: int  # finished, of prompts that were not open at the end
    mean_tokens: float
    reward: float | None
    accuracy: float | None
    entropy: float | None  # nats, at the temperature of the source
    truncated_share: float | None


def source_figures(facts: RunFacts) -> list[SourceFigures]:
    """By name; none in a run with one source."""
    return list(_figures(facts))


def _figures(facts: RunFacts) -> Iterator[SourceFigures]:
    names = ("rollout/reward/{}", "rollout/reward/{}/accuracy", "train/entropy/{}", "train/truncated_share/{}")
    for source in sorted({one.source for one in facts.samples if one.source}):
        own = [one for one in facts.samples if one.source == source and one.group is not None]
        last = [_last(facts.curve(name.format(source))) for name in names]
        mean = fmean(one.n_tokens for one in own) if own else 0.0
        yield SourceFigures(source, len({one.group for one in own}), len(own), mean, *last)


def _last(curve: Curve) -> float | None:
    n = -int(-len(curve) * LAST // 1)
    return fmean(curve.values[-n:]) if n else None

"""The gap between a server's log-probs and the learner's at the same weights, by position of the token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.report.page.parts import PageTable, Section
from tools.trust.batches import Step

TOLERANCES = {"float32": 1e-3}  # of the mean |difference| at any position, by model.dtype
ROUGH = 0.03  # for bfloat16 and float16, in which server and learner round differently
LEAST = 8  # tokens, below which a mean is shown and not judged
FIGURES = ("loss", "grad_norm", "mismatch_kl", "ess", "clip_share")


@dataclass(frozen=True, slots=True)
class Gap:
    """|learner's log-prob - server's| of the tokens at positions first, ..., last of their samples."""

    first: int
    last: int
    n: int  # tokens
    mean: float
    largest: float

    @property
    def place(self) -> str:
        return f"position {self.first}" if self.first == self.last else f"positions {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The gaps of a proof, and the same batches trained with another correction."""

    engine: str
    tolerance: float
    gaps: Sequence[Gap]
    correction: str  # of the config
    other: str  # the one that it is compared with
    switched: Sequence[Step]  # the updates with it; () where the settings refuse it

    @property
    def fault(self) -> Gap | None:
        """The first gap above the tolerance."""
        return next((gap for gap in self.gaps if gap.n >= LEAST and not gap.mean <= self.tolerance), None)

    @property
    def largest(self) -> float | None:
        return max((gap.largest for gap in self.gaps), default=None)

    @property
    def sentence(self) -> str:
        rule = f"a mean of at most {self.tolerance:g} at each position"
        if (gap := self.fault) is not None:
            return (
                f"Mismatch of log-probs: those of {self.engine} differ from the learner's by {gap.mean:.3g} on "
                f"average at {gap.place} ({gap.n} tokens); tolerance: {rule}."
            )
        return (
            f"Log-probs of {self.engine} are the learner's within tolerance ({rule}; largest {self.largest or 0:.3g})."
        )

    def as_json(self) -> dict[str, Any]:
        rows = [[gap.first, gap.last, gap.n, gap.mean, gap.largest] for gap in self.gaps]
        figures = [{key: step.figures.get(key) for key in FIGURES} for step in self.switched]
        return {
            "tolerance": self.tolerance,
            "within_tolerance": self.fault is None,
            "by_position": [dict(zip(("first", "last", "tokens", "mean", "max"), row, strict=True)) for row in rows],
            "correction": self.correction,
            "other_correction": {"correction": self.other, "steps": figures},
        }

    def section(self, ring: Sequence[Step]) -> Section:
        """`ring`: the updates with the config's own correction."""
        rows = [[gap.place, str(gap.n), f"{gap.mean:.3g}", f"{gap.largest:.3g}"] for gap in self.gaps]
        tables = [PageTable(("place in the sample", "tokens", "mean", "largest"), rows)]
        pairs = [
            [str(one.version), *(f"{shown(one.figures.get(key))} | {shown(two.figures.get(key))}" for key in FIGURES)]
            for one, two in zip(ring, self.switched, strict=False)
        ]
        if pairs:
            title = f"The same batches, corrected | not: {self.correction} | {self.other}"
            tables.append(PageTable(("step", *FIGURES), pairs, title))
        return Section("mismatch", "Log-probs of the server and of the learner", self.sentence, tables=tables)


def gaps_of(steps: Iterable[Step]) -> list[Gap]:
    """By ranges of positions that double: 0, 1, 2 to 3, 4 to 7, ..."""
    samples = [sample for step in steps for sample in step.samples if sample.own is not None]
    found = [(np.arange(len(s.logps)), np.abs(np.asarray(s.own, np.float64) - s.logps)) for s in samples]
    at = np.concatenate([np.zeros(0, int), *(places for places, _ in found)])
    gap = np.concatenate([np.zeros(0), *(values for _, values in found)])
    gaps, first = [], 0
    while (at >= first).any():
        last = max(0, 2 * first - 1)
        part = gap[(at >= first) & (at <= last)]
        gaps.append(Gap(first, min(last, int(at.max())), len(part), float(part.mean()), float(part.max())))
        first = last + 1
    return gaps


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "none"

"""Findings of an audit, and the verdict on each invariant."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

KEPT = 5  # findings shown for one invariant; all are counted

NAMES = {
    "I1": "backlog",
    "I2": "age",
    "I3": "conservation",
    "I4": "exactly once",
    "I5": "version truth",
    "I6": "one clock",
    "I7": "born fresh",
    "I8": "groups",
    "I9": "back-pressure",
    "I10": "reward truth",
    "I11": "liveness",
    "I12": "accounting",
    "journal": "gapless, readable lines",
}


class InvariantVerdict(StrEnum):
    HOLDS = "holds"
    BROKEN = "broken"
    NOT_SEEN = "not seen"  # the journal does not show it


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule: the line that shows it, the actor or prompt that it concerns, and the rule with its values."""

    where: str  # file:line
    text: str  # the rule first
    ids: Mapping[str, int | str]


@dataclass(slots=True)
class Findings:
    """Collects findings by invariant: all are counted, the first few kept."""

    n: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[Finding]] = field(default_factory=dict)

    def add(self, invariant: str, where: str, text: str, **ids: int | str) -> None:
        self.n[invariant] += 1
        kept = self.first.setdefault(invariant, [])
        if len(kept) < KEPT:
            kept.append(Finding(where, text, ids))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one invariant, and its basis (or why there is none)."""

    verdict: InvariantVerdict
    why: str
    n_findings: int
    findings: list[Finding]


@dataclass(slots=True)
class Coverage:
    """Counts of checks by invariant, and what the journal lacks for a check."""

    counts: dict[str, str] = field(default_factory=dict)  # invariant -> what was checked, for people
    missing: dict[str, str] = field(default_factory=dict)  # invariant -> why it cannot be judged

    def judge(self, findings: Findings) -> dict[str, Judgement]:
        """A finding means broken. An invariant that was neither checked nor explained is "not seen"."""
        return {name: self._judge(name, findings) for name in NAMES}

    def _judge(self, name: str, findings: Findings) -> Judgement:
        n, first = findings.n[name], findings.first.get(name, [])
        if n:
            return Judgement(InvariantVerdict.BROKEN, f"{n} time{'s' * (n > 1)}", n, first)
        if name in self.missing or name not in self.counts:
            why = self.missing.get(name, "nothing in the journal shows it")
            return Judgement(InvariantVerdict.NOT_SEEN, why, 0, [])
        return Judgement(InvariantVerdict.HOLDS, self.counts[name], 0, [])

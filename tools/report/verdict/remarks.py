"""One remark on a run, and the verdict: all remarks on it, with what to change."""

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    """How bad it is. Also the CSS class of a remark."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Remark:
    """One sentence, with the figures it rests on, and what to change."""

    grade: Grade
    sentence: str
    evidence: str = ""
    advice: tuple[str, ...] = ()  # sentences, the most useful first


@dataclass(frozen=True, slots=True)
class Verdict:
    """The four answers at the top of a report."""

    limit: Remark  # what limits the run
    learning: Remark  # whether it learns
    health: tuple[Remark, ...]  # whether it is healthy: at least one remark

    @property
    def health_summary(self) -> Remark:
        """The worst remark on its health, and how many more there are."""
        first, n_more = self.health[0], sum(remark.grade != Grade.GOOD for remark in self.health[1:])
        if first.grade == Grade.GOOD:
            return Remark(Grade.GOOD, "Yes.", " ".join(remark.sentence for remark in self.health))
        more = f"{n_more} more remarks are under Health." if n_more else ""
        answer = "No" if first.grade == Grade.BAD else "Mostly"
        return Remark(first.grade, f"{answer}. {first.sentence}", " ".join(filter(None, [first.evidence, more])))

    @property
    def advice(self) -> list[str]:
        """What to change: first what makes it fail, then what limits it. Each sentence once."""
        ordered = sorted((*self.health, self.learning, self.limit), key=lambda one: one.grade != Grade.BAD)
        return list(dict.fromkeys(sentence for remark in ordered for sentence in remark.advice))


def counted(n: int, noun: str) -> str:
    """1 stall, 2 stalls."""
    return f"{n} {noun}{'s' * (n != 1)}"


def as_sentence(text: str) -> str:
    """A text of another tool with a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def percent(share: float) -> str:
    return f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def seconds(value: float) -> str:
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"

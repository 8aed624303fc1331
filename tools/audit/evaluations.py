"""Evaluations recounted: their figures are those of the values alone (I10); knows no prompt that is trained."""

import math
from dataclasses import dataclass, field

from tools.audit.reading import File, Line


@dataclass(slots=True)
class Evaluated:
    """Verdicts of one evaluation."""

    n: int = 0
    rewards: list[float] = field(default_factory=list)
    judged: list[bool] = field(default_factory=list)


class Evaluations:
    """`scored` and `evaluation` lines of the head; a term begins an open evaluation anew."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.n = 0
        self._open: dict[str, Evaluated] = {}

    def go_back(self) -> None:
        self._open.clear()

    def score(self, line: Line) -> None:
        known = self._open.setdefault(line["evaluation"], Evaluated())
        known.n += 1
        if line["status"] == "value":
            known.rewards.append(line["reward"])
            if line["correct"] is not None:
                known.judged.append(line["correct"])

    def close(self, line: Line) -> None:
        """A timeout or an error is counted, never a 0."""
        known = self._open.pop(line["name"], Evaluated())
        self.n += 1
        told = (line["n"], line["reward"], line["accuracy"])
        mine = (known.n, _mean(known.rewards), _mean(known.judged))
        n_without = known.n - len(known.rewards)
        if line["n_failed"] < n_without or not all(map(_same, told, mine)):
            rule = f"an evaluation's n, reward and accuracy are of its values alone ({n_without} have none)"
            self.file.add("I10", f"{rule}: {mine}, not {told}", version=line["version"])


def _mean(values: list[float] | list[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isclose(one, other))

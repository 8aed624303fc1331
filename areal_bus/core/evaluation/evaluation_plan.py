"""Which evaluation is next, and whether its metric has stopped improving. Pure: a function of rules and figures.

The figures of finished evaluations are part of every head checkpoint, so a resumed run decides the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LEAST_SHARE = 0.95  # of the answers that an evaluation needs to decide anything
STEP = "step-"  # names of evaluations in training: step-8, step-8:SET
ENDS = ("before", "after")  # and of the others

Figures = Mapping[str, Mapping[str, str | int | float | None]]


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Problems that are evaluated together."""

    name: str  # "" for the problems of [evaluate] itself
    n_samples: int
    problems: tuple[str, ...]  # JSON objects


def name_of(when: str, problems: EvaluationSet) -> str:
    """The name of an evaluation: "before", "step-8:aime"."""
    return f"{when}:{problems.name}" if problems.name else when


def first_missing(when: str, sets: tuple[EvaluationSet, ...], figures: Figures) -> EvaluationSet | None:
    """The first set without figures of this moment."""
    return next((problems for problems in sets if name_of(when, problems) not in figures), None)


def due(
    version: int, *, every: int, sets: tuple[EvaluationSet, ...], figures: Figures
) -> tuple[str, EvaluationSet] | None:
    """The evaluation that is due at this published version: its moment and its set. None: all are done.

    Moments are multiples of `every`, without version 0. The set that was evaluated longest ago is first, so that a
    slow set does not displace the others. Of several moments that have passed, only the last one is evaluated.
    """
    step = version - version % every if every else 0
    when = f"{STEP}{step}"
    waiting = [problems for problems in sets if name_of(when, problems) not in figures]
    if not step or not waiting:
        return None

    def newest(problems: EvaluationSet) -> int:
        return max((version for version, _ in _values(problems.name, "k", figures, of_step=True)), default=0)

    return when, min(waiting, key=newest)


def history(set_name: str, metric: str, figures: Figures, *, with_ends: bool = False) -> list[tuple[int, float]]:
    """(version, metric) of the evaluations of a set in training, oldest first; without those that have no value or
    decide nothing.

    `with_ends`: also those before and after training; the one after replaces an earlier one of the same version.
    """
    figures = {name: found for name, found in figures.items() if decides(found)}
    found = sorted(_values(set_name, metric, figures, of_step=True))
    if not with_ends:
        return found
    ends = dict(sorted(_values(set_name, metric, figures, of_step=False)))
    return sorted((dict(found) | ends).items())


def decides(found: Mapping[str, str | int | float | None]) -> bool:
    """Whether keep_best and early stopping count an evaluation: it has LEAST_SHARE of its answers."""
    n_asked, n_missing = found.get("n_asked"), found.get("n_missing")  # None: of an older run
    if not isinstance(n_asked, int) or not isinstance(n_missing, int):
        return True
    return n_asked - n_missing >= LEAST_SHARE * n_asked


def _values(set_name: str, metric: str, figures: Figures, *, of_step: bool) -> Iterator[tuple[int, float]]:
    for name, found in figures.items():
        moment, _, of = name.partition(":")
        version, value = found.get("version"), found.get(metric)
        is_wanted = of == set_name and (moment.startswith(STEP) if of_step else moment in ENDS)
        if is_wanted and isinstance(version, int) and isinstance(value, int | float):
            yield version, value


def best(values: list[tuple[int, float]]) -> tuple[int, float] | None:
    """The oldest of the best values, with its version."""
    return max(values, key=lambda value: (value[1], -value[0]), default=None)


def has_stopped_improving(values: list[tuple[int, float]], *, patience: int) -> bool:
    """Whether the last `patience` evaluations did not exceed the best one before them. Never for a patience of 0."""
    if not patience or len(values) <= patience:
        return False
    before, last = values[:-patience], values[-patience:]
    return max(value for _, value in last) <= max(value for _, value in before)

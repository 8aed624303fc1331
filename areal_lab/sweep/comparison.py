"""Summaries of the cells of a sweep: means over seeds, and differences from the baseline. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from areal_lab.sweep.results import Result
from tools.report.facts.seeds import Difference, Mean, mean_over, paired

Cell = tuple[tuple[str, str], ...]  # (axis, value), in the order of the file


@dataclass(frozen=True, slots=True)
class CellSummary:
    """One row of the table."""

    cell: Cell
    score: Mean | None
    auc: Mean | None
    against: Difference | None  # the baseline's cell; None for a baseline, or where it has not run
    is_baseline: bool
    n_failed: int


def summaries(results: Iterable[Result], baseline: Mapping[str, str]) -> list[CellSummary]:
    """One summary a cell, in the order of the results. `baseline`: axis -> value."""
    cells: dict[Cell, list[Result]] = {}
    for result in results:
        cells.setdefault(tuple(result.cell.items()), []).append(result)
    return [_summary(cell, cells, baseline) for cell in cells]


def _summary(cell: Cell, cells: Mapping[Cell, list[Result]], baseline: Mapping[str, str]) -> CellSummary:
    other = tuple((axis, baseline.get(axis, value)) for axis, value in cell)
    scores, aucs = by_seed(cells[cell], "score"), by_seed(cells[cell], "auc")
    is_baseline = other == cell
    against = None if is_baseline or other not in cells else paired(scores, by_seed(cells[other], "score"))
    n_failed = sum(bool(result.error) for result in cells[cell])
    means = mean_over(list(scores.values())), mean_over(list(aucs.values()))
    return CellSummary(cell, *means, against, is_baseline, n_failed)


def by_seed(results: Iterable[Result], field: str) -> dict[int, float]:
    """Seed -> value of the results that have one."""
    return {result.seed: value for result in results if (value := getattr(result, field)) is not None}

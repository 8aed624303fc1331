"""The results of a sweep's folder, laid out on its axes: one for x, one for colours, the others for small charts.

Runs that differ in their seed only form a group: its curves are the mean over the seeds with the range as a band.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_bus.errors import ConfigError
from areal_lab.sweep.comparison import CellSummary, summaries
from areal_lab.sweep.report import axes_of, number_or_text
from areal_lab.sweep.results import Result, ResultFile
from tools.report.facts.run_facts import read_curves
from tools.report.facts.seeds import SeedGroup
from tools.run import Run

MAX_COLOURS = 8
MAX_GROUPS = 8  # cells whose curves are drawn, where run folders were kept


@dataclass(slots=True)
class SweepFacts:
    """All results of a sweep."""

    folder: Path
    results: list[Result]
    cells: list[CellSummary]
    x: str  # axis
    colour: str  # axis; "" if there is no other
    groups: list[SeedGroup] = field(default_factory=list)  # of the best cells whose run folders were kept

    @property
    def axes(self) -> list[str]:
        """Axes with more than one value, in the order of the file."""
        return [axis for axis, values in axis_values(self.results).items() if len(values) > 1]


def read_sweep_facts(folder: Path, x: str | None) -> SweepFacts:
    """Read a sweep's folder. Raises ConfigError when it has no results, or no axis `x`."""
    results = list(ResultFile(folder / "results.jsonl").read().values())
    if not results:
        raise ConfigError(f"missing results of a sweep: {folder / 'results.jsonl'} has no line")
    values = {axis: found for axis, found in axis_values(results).items() if len(found) > 1}
    chosen = choose_x(values) if x is None else next((axis for axis in values if x in (axis, short(axis))), None)
    if chosen is None:
        raise ConfigError(
            f"--x must be an axis with several values: {', '.join(map(short, values)) or 'none'}; got {x}"
        )
    others = {axis: found for axis, found in values.items() if axis != chosen and len(found) <= MAX_COLOURS}
    colour = max(others, key=lambda axis: len(others[axis]), default="")
    facts = SweepFacts(folder, results, summaries(results, {}), chosen, colour)
    facts.groups = kept_groups(facts)
    return facts


def axis_values(results: Sequence[Result]) -> dict[str, list[str]]:
    """Axis -> its values, numbers in their order."""
    found: dict[str, dict[str, None]] = {axis: {} for axis in axes_of(result.cell for result in results)}
    for result in results:
        for axis, value in result.cell.items():
            found[axis][value] = None
    return {axis: sorted(values, key=in_order) for axis, values in found.items()}


def in_order(value: str) -> tuple[bool, float, str]:
    number = number_or_text(value)
    return (True, 0.0, value) if isinstance(number, str) else (False, number, value)


def choose_x(values: Mapping[str, Sequence[str]]) -> str | None:
    """The axis with the most values, numbers before names; None without an axis."""
    return max(values, key=lambda axis: (not in_order(values[axis][-1])[0], len(values[axis])), default=None)


def short(axis: str) -> str:
    """The last word of a config key."""
    return axis.rpartition(".")[2]


def kept_groups(facts: SweepFacts) -> list[SeedGroup]:
    """The curves of the best cells whose run folders were kept (`--keep`): a group a cell, a run a seed."""
    folders = {path.name.rpartition("-")[2]: path for path in facts.folder.glob("runs/*") if path.is_dir()}
    found = []
    for one in best_first(facts.cells):
        kept = [result for result in facts.results if tuple(result.cell.items()) == one.cell]
        wheres = [Run(folders[result.digest[:8]]) for result in kept if result.digest[:8] in folders]
        runs = [read_curves(where, where.name) for where in wheres if where.journals()]
        if runs:
            found.append(SeedGroup(name_of(one, facts.axes), runs))
        if len(found) == MAX_GROUPS:
            break
    return found


def best_first(cells: Sequence[CellSummary]) -> list[CellSummary]:
    """The cells with a score, highest first."""
    return sorted((one for one in cells if one.score), key=lambda one: -(one.score.value if one.score else 0.0))


def name_of(one: CellSummary, axes: Sequence[str]) -> str:
    """A cell as text, by the axes that have several values."""
    cell = dict(one.cell)
    return ", ".join(f"{short(axis)} {cell[axis]}" for axis in axes if axis in cell) or "the only cell"

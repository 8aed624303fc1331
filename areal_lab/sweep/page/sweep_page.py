"""The page of a sweep: score over an axis with seeds as mean and band, the cells, and the curves of kept runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from areal_lab.sweep.comparison import Cell, by_seed
from areal_lab.sweep.page.sweep_facts import SweepFacts, axis_values, best_first, name_of, read_sweep_facts, short
from areal_lab.sweep.report import shown
from areal_lab.sweep.results import MEANS, Result
from tools.report.facts.curves import CurveBin
from tools.report.facts.seeds import mean_over, paired
from tools.report.page.charts import PlotLine, line_chart, number
from tools.report.page.comparison_page import curves_section
from tools.report.page.parts import Card, Page, PageTable, Section, of_place
from tools.report.verdict.remarks import Grade, Remark

Figure = Callable[[Result], float | None]
FIGURES: Mapping[str, tuple[str, Figure]] = {
    "score": ("Score", lambda result: result.score),
    "auc": ("Mean score over the run", lambda result: result.auc),
    "reward_last": ("Reward at the end", lambda result: result.reward_last),
} | {
    name: (name.replace("_", " ").capitalize(), lambda result, name=name: (result.means or {}).get(name))
    for name in MEANS
}


def read_page(folder: Path, x: str | None) -> Page:
    """The page of a sweep's folder, with axis `x` for the charts. Raises ConfigError for a folder without results."""
    return sweep_page(read_sweep_facts(folder, x))


def sweep_page(facts: SweepFacts) -> Page:
    """The page."""
    n_failed = sum(bool(result.error) for result in facts.results)
    answers = [
        ("Which setting is best?", best_remark(facts)),
        ("Which axis matters most?", axis_remark(facts)),
        ("Did all jobs run?", jobs_remark(facts, n_failed)),
    ]
    sections = [figure_section(facts, key) for key in FIGURES]
    sections = [section for section in sections if section.cards]
    if facts.groups:
        sections.insert(1, curves_section(facts.groups))
    sections += [axes_section(facts), cells_section(facts), *([failed_section(facts)] if n_failed else [])]
    n_seeds = len({result.seed for result in facts.results})
    subtitle = f"{facts.folder}: {len(facts.results)} jobs, {len(facts.cells)} cells, {n_seeds} seeds"
    return Page(f"Sweep {facts.folder.resolve().name}", subtitle, answers, (), (), sections)


def best_remark(facts: SweepFacts) -> Remark:
    """The cell with the highest score, and how many cannot be told from it."""
    ranked = best_first(facts.cells)
    if not ranked:
        return Remark(Grade.BAD, "No job has a score.")
    scores = {one.cell: _scores(facts, one.cell) for one in ranked}
    best = ranked[0]
    found = [paired(scores[best.cell], scores[one.cell]) for one in ranked[1:]]
    alike = sum(one is None or one.verdict != "higher" for one in found)
    evidence = f"Score {shown(best.score)} over {best.score.n if best.score else 0} seeds. "
    evidence += f"{alike} of the {len(ranked) - 1} other cells are not surely lower (paired by seed, 95 %)."
    return Remark(Grade.GOOD if not alike else Grade.NOTE, f"{name_of(best, facts.axes)}.", evidence)


def _scores(facts: SweepFacts, cell: Cell) -> dict[int, float]:
    return by_seed((result for result in facts.results if tuple(result.cell.items()) == cell), "score")


def marginals(facts: SweepFacts, axis: str) -> dict[str, float]:
    """Value of the axis -> mean score of its cells."""
    found: dict[str, list[float]] = {value: [] for value in axis_values(facts.results)[axis]}
    for one in facts.cells:
        cell = dict(one.cell)
        if one.score and axis in cell:
            found[cell[axis]].append(one.score.value)
    return {value: fmean(scores) for value, scores in found.items() if scores}


def axis_remark(facts: SweepFacts) -> Remark:
    """The axis whose mean score changes most."""
    ranges = {}
    for axis in facts.axes:
        means = marginals(facts, axis).values()
        ranges[axis] = max(means) - min(means) if means else 0.0
    if not ranges:
        return Remark(Grade.NOTE, "There is no axis with several values.")
    axis = max(ranges, key=lambda name: ranges[name])
    means_of = marginals(facts, axis)
    told = "; ".join(f"{value}: {number(mean)}" for value, mean in means_of.items())
    return Remark(Grade.GOOD, f"{short(axis)}.", f"Mean score by its value: {told}. Cells differ in other axes, too.")


def jobs_remark(facts: SweepFacts, n_failed: int) -> Remark:
    hours = sum(result.wall_s for result in facts.results) / 3600
    evidence = f"{hours:.1f} hours of jobs."
    if n_failed:
        return Remark(Grade.BAD, f"{n_failed} of {len(facts.results)} failed.", evidence)
    return Remark(Grade.GOOD, f"All {len(facts.results)} that have run.", evidence)


def figure_section(facts: SweepFacts, key: str) -> Section:
    """One figure over x: a small chart for each combination of the axes that are neither x nor colour."""
    title, figure = FIGURES[key]
    section = Section(f"figure-{key}", f"{title} by {short(facts.x)}")
    if key == "score":
        section.intro = "Mean over seeds; the band is its standard error."
    charts: dict[str, dict[str, dict[str, list[float]]]] = {}  # facet -> line -> x -> values of the seeds
    for result in facts.results:
        value = figure(result)
        if value is not None and facts.x in result.cell:
            facet = ", ".join(f"{short(a)} {result.cell[a]}" for a in facts.axes
                              if a not in (facts.x, facts.colour) and a in result.cell)  # fmt: skip
            line = charts.setdefault(facet, {}).setdefault(result.cell.get(facts.colour, title), {})
            line.setdefault(result.cell[facts.x], []).append(value)
    every = {value for lines in charts.values() for of in lines.values() for values in of.values() for value in values}
    if len(every) > 1 or key == "score":
        section.cards += [facet_card(facts, facet or title, title, lines) for facet, lines in charts.items()]
    return section


def facet_card(facts: SweepFacts, facet: str, title: str, lines: Mapping[str, Mapping[str, Sequence[float]]]) -> Card:
    values = axis_values(facts.results)
    names, colours = values[facts.x], values.get(facts.colour, [title])
    drawn = []
    for place, line in enumerate(colours):
        bins = [
            CurveBin(names.index(x), mean.value, mean.value - (mean.se or 0.0), mean.value + (mean.se or 0.0))
            for x, of_seeds in sorted(lines.get(line, {}).items(), key=lambda item: names.index(item[0]))
            if (mean := mean_over(of_seeds)) is not None
        ]
        drawn += [PlotLine(f"{short(facts.colour)} {line}".strip(), of_place(place), bins)] if bins else []
    chart = line_chart(drawn, f"{title} by {facts.x}: {facet}", x_label=short(facts.x), x_names=names)
    legend = [(one.name, one.colour) for one in drawn] if len(drawn) > 1 else []
    return Card(facet, chart, "", legend)


def axes_section(facts: SweepFacts) -> Section:
    """Mean score by value of each axis."""
    section = Section("axes", "Mean score by axis")
    for axis in facts.axes:
        rows = [[value, number(mean)] for value, mean in marginals(facts, axis).items()]
        section.tables.append(PageTable([short(axis), "mean score of its cells"], rows, right=frozenset({1})))
    return section


def cells_section(facts: SweepFacts) -> Section:
    """All cells, the best first."""
    rows = []
    ranked = best_first(facts.cells)
    for one in [*ranked, *(cell for cell in facts.cells if cell not in ranked)]:
        cell = dict(one.cell)
        n = one.score.n if one.score else 0
        failed = str(one.n_failed) if one.n_failed else ""
        rows.append([*(cell.get(axis, "") for axis in facts.axes), str(n), shown(one.score), shown(one.auc), failed])
    columns = [*map(short, facts.axes), "seeds", "score", "mean over the run", "failed"]
    n_axes = len(facts.axes)
    right = frozenset({n_axes, n_axes + 1, n_axes + 2, n_axes + 3})
    return Section(
        "cells", "Cells", "Mean over seeds and its standard error.", tables=[PageTable(columns, rows, right=right)]
    )


def failed_section(facts: SweepFacts) -> Section:
    """Jobs that failed, with their errors."""
    rows = [
        [", ".join(f"{short(axis)} {value}" for axis, value in result.cell.items()), str(result.seed), result.error]
        for result in facts.results
        if result.error
    ]
    return Section("failed", "Failed jobs", tables=[PageTable(["cell", "seed", "error"], rows, right=frozenset({1}))])

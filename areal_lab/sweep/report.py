"""The table (text, CSV) and the plot (SVG) of a sweep."""

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from areal_lab.sweep.comparison import CellSummary
from areal_lab.sweep.results import MEANS, Result
from tools import terminal
from tools.report.facts.seeds import Difference, Mean

MARKERS, N_COLORS = "os^vD", 10  # of the plot: a line has a color of matplotlib's ten and a marker
AFTER_AXES = ("seeds", "score", "auc", "minus baseline", "")  # titles
COLUMNS = ("score", "score_se", "auc", "reward_last", "n_updates", "wall_s")


def rows(found: Sequence[CellSummary]) -> list[list[str]]:
    """The table: titles, then one row a cell."""
    axes = axes_of(dict(one.cell) for one in found)
    titles = [*short_names(axes).values(), *AFTER_AXES]
    made = [titles]
    for one in found:
        cell, n = dict(one.cell), one.score.n if one.score else 0
        failed = f"{one.n_failed} failed" if one.n_failed else ""
        says = "baseline" if one.is_baseline else one.against.verdict if one.against else ""
        figures = [shown(one.score), shown(one.auc), shown_difference(one.against)]
        note = ", ".join(filter(None, [says, failed]))
        made.append([*(cell.get(axis, "") for axis in axes), str(n), *figures, note])
    return made


def drawn(table: Sequence[Sequence[str]]) -> list[str]:
    """For standard output: with lines and styles on a terminal."""
    return terminal.table(table, right=n_seeds_column(table))


def plain(table: Sequence[Sequence[str]]) -> list[str]:
    """For a file."""
    return terminal.columns(table, right=n_seeds_column(table))


def n_seeds_column(table: Sequence[Sequence[str]]) -> frozenset[int]:
    return frozenset({len(table[0]) - len(AFTER_AXES)})


def axes_of(cells: Iterable[Mapping[str, str]]) -> list[str]:
    """The axes of all cells, in order of appearance."""
    return list(dict.fromkeys(axis for cell in cells for axis in cell))


def short_names(axes: Iterable[str]) -> dict[str, str]:
    """Axis -> the last part of its key, or the whole key where two axes have the same last part."""
    last = {axis: axis.rpartition(".")[2] for axis in axes}
    n_axes = Counter(last.values())
    return {axis: name if n_axes[name] == 1 else axis for axis, name in last.items()}


def shown(mean: Mean | None) -> str:
    if mean is None:
        return "-"
    return f"{mean.value:.3f}" if mean.se is None else f"{mean.value:.3f} +- {mean.se:.3f}"


def shown_difference(difference: Difference | None) -> str:
    if difference is None:
        return ""
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.3f}"
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """One row a job: its cell, seed and figures. Empty where a figure does not exist."""
    axes = axes_of(result.cell for result in results)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*short_names(axes).values(), "seed", *COLUMNS, *MEANS, "error"])
        for result in results:
            figures = [rounded(getattr(result, column)) for column in COLUMNS]
            means = [rounded((result.means or {}).get(name)) for name in MEANS]
            writer.writerow(
                [*(result.cell.get(axis, "") for axis in axes), result.seed, *figures, *means, result.error]
            )


def rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def write_plot(path: Path, found: Sequence[CellSummary], *, x: str, metric: str) -> bool:
    """Score over axis `x`, a line for each combination of the other axes, with standard errors. False without
    matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    with rc_context({"svg.hashsalt": "sweep", "font.size": 9}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for i, (label, points) in enumerate(lines_of(found, x).items()):
            at, values, errors = zip(*points, strict=True)
            marker = MARKERS[i // N_COLORS % len(MARKERS)]  # matplotlib repeats its colors
            axes.errorbar(at, values, yerr=errors, label=label, marker=marker, markersize=3, capsize=2, linewidth=1)
        places = {place for points in lines_of(found, x).values() for place, _, _ in points}
        ticks = sorted(place for place in places if isinstance(place, float))
        if len(ticks) == len(places):
            axes.set_xscale("symlog" if min(ticks, default=0.0) <= 0 else "log")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlabel(x)
        axes.set_ylabel(f"{metric}, mean and standard error over seeds")
        axes.grid(alpha=0.3)
        if any(lines_of(found, x)):
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path, metadata={"Date": None})
    return True


def lines_of(found: Sequence[CellSummary], x: str) -> dict[str, list[tuple[float | str, float, float]]]:
    """Label -> points (x, mean, standard error), in the order of x. The label has the axes that differ."""
    made: dict[str, list[tuple[float | str, float, float]]] = {}
    values = {axis: {dict(one.cell).get(axis) for one in found} for axis in axes_of(dict(one.cell) for one in found)}
    short = short_names(values)
    for one in found:
        cell = dict(one.cell)
        if one.score is None or x not in cell:
            continue
        names = {axis: value for axis, value in cell.items() if axis != x and len(values[axis]) > 1}
        label = ", ".join(f"{short[axis]} {value}" for axis, value in names.items())
        made.setdefault(label, []).append((number_or_text(cell[x]), one.score.value, one.score.se or 0.0))
    return {
        label: sorted(points, key=lambda point: (isinstance(point[0], str), point[0])) for label, points in made.items()
    }


def number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value

"""Charts as inline SVG of one size: lines with bands, areas, histograms, bars; page.css and page.js go with them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10

from markupsafe import Markup, escape

from tools.report.facts.curves import CurveBin

WIDTH, HEIGHT = 360, 170  # of a chart, in units of its viewBox
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 10, 26  # nine characters fit left of the axis


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale from values to units of the viewBox."""

    low: float
    high: float
    begin: float  # place of `low`
    end: float  # place of `high`

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.begin + self.end) / 2
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self, n: int) -> list[float]:
        """About n round values within the axis."""
        step = round_step((self.high - self.low) / n) if self.high > self.low else 0.0
        if step == 0.0:
            return [self.low]
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def x_axis(values: Sequence[float]) -> Axis:
    return Axis(min(values), max(values), LEFT, WIDTH - RIGHT)


def y_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """With some room above and below, but not below 0 for values that never are."""
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    least = low if low == 0 else max(low - room, 0.0) if low > 0 else low - room
    return Axis(least, high + room, HEIGHT - BOTTOM, TOP)


def number(value: float) -> str:
    """A short number for a tick or a table: 0.25, 1,500, 12k, 3e-07."""
    size = abs(value)
    if size >= 1e12 or (0 < size < 1e-3):
        return f"{value:.2g}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:,.0f}" if size >= 1e3 else f"{value:.3g}"


def place(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


WHOLE = ("version", "versions behind")  # labels of an x-axis of whole numbers
MAX_NAME = 14  # characters of a tick
CHARACTER = 6.0  # width of one in a tick, about
MAX_MARKS = 40  # a line with fewer points shows them


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One line of a chart, with a band from `low` to `high`."""

    name: str
    colour: str  # class
    bins: Sequence[CurveBin]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a stacked chart: a value for each x."""

    name: str
    colour: str  # class
    values: Sequence[float]

    def shares(self, totals: Sequence[float]) -> "Layer":
        """In percent of these sums; 0 where a sum is."""
        values = [100 * value / total if total else 0.0 for value, total in zip(self.values, totals, strict=True)]
        return Layer(self.name, self.colour, values)


def line_chart(
    lines: Sequence[PlotLine],
    label: str,
    *,
    x_label: str = "version",
    x_names: Sequence[str] = (),
    from_zero: bool = False,
) -> Markup:
    """Lines over x; with `x_names` x = 0, 1, 2, ... have these names. Raises ValueError when there is no point."""
    xs = x_axis([one.x for line in lines for one in line.bins])
    values = [value for line in lines for one in line.bins for value in (one.low, one.high)]
    ys = y_axis(values, from_zero=from_zero)
    parts = [_frame(xs, ys, x_label, x_names)]
    parts += [_band(line, xs, ys) for line in lines]
    parts += [_line(line, xs, ys) for line in lines]
    hover = {line.name: {one.x: _figures(one) for one in line.bins} for line in lines}
    return _svg(parts, label, hover, xs, x_label, names_of_x={float(i): name for i, name in enumerate(x_names)})


def stacked_chart(edges: Sequence[float], layers: Sequence[Layer], label: str, *, unit: str, of_all: bool) -> Markup:
    """Steps of stacked layers: value i from edges[i] to edges[i + 1]. With `of_all` as shares of each bin's sum."""
    n = len(edges) - 1
    totals = [sum(layer.values[i] for layer in layers) for i in range(n)]
    if of_all:
        layers = [one.shares(totals) for one in layers]
    tops = [0.0] * n
    xs = x_axis(edges)
    ys = Axis(0.0, 100.0, HEIGHT - BOTTOM, TOP) if of_all else y_axis([*totals, 0.0], from_zero=True)
    parts = [_frame(xs, ys, "version")]
    for layer in layers:
        bottoms, tops = tops, [top + value for top, value in zip(tops, layer.values, strict=True)]
        up, down = _steps(edges, tops, xs, ys), reversed(_steps(edges, bottoms, xs, ys))
        parts.append(f'<path class="fill {layer.colour}" d="M{"L".join([*up, *down])}Z"/>')
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    hover: dict[str, dict[float, str]] = {}
    for layer in reversed(layers):
        values = {x: value for x, value in zip(middles, layer.values, strict=True) if value > 0}
        hover[layer.name] = {x: f"{number(value)}{unit}" for x, value in values.items()}
    names = {x: _versions(a, b) for x, (a, b) in zip(middles, pairwise(edges), strict=True)}
    return _svg(parts, label, hover, xs, "version", names_of_x=names)


def histogram(
    counts: Mapping[int, Sequence[float]], names: Sequence[tuple[str, str]], label: str, x_label: str
) -> Markup:
    """A bar for each whole x, stacked of several counts; `names`: (name, colour class) of each."""
    least, most = min(counts), max(counts)
    xs = Axis(least - 0.5, most + 0.5, LEFT, WIDTH - RIGHT)
    ys = y_axis([sum(stack) for stack in counts.values()], from_zero=True)
    total = sum(sum(stack) for stack in counts.values()) or 1.0
    width = max(min(0.8 * (xs(1) - xs(0)), 60.0), 0.5)
    parts = [_frame(xs, ys, x_label)]
    for x, stack in sorted(counts.items()):
        base = 0.0
        for (name, colour), n in zip(names, stack, strict=True):
            if n > 0:
                title = f"{x_label} {x}: {number(n)} {name} ({n / total:.1%})"
                parts.append(_bar(xs(x) - width / 2, ys(base + n), width, ys(base) - ys(base + n), colour, title))
            base += n
    return _svg(parts, label, {})


def bar_rows(rows: Sequence[tuple[str, Sequence[Layer]]], label: str) -> Markup:
    """A stacked bar for each row, as shares of its sum. A layer has one value."""
    height, left = 18, 110
    parts = []
    for line, (name, layers) in enumerate(rows):
        top, at = 4 + line * height, float(left)
        total = sum(layer.values[0] for layer in layers) or 1.0
        parts.append(_tick(left - 6, top + 10, "end", name[: MAX_NAME + 2]))
        for layer in layers:
            width = (WIDTH - left - RIGHT) * layer.values[0] / total
            title = f"{name}: {layer.name} {layer.values[0] / total:.1%} ({number(layer.values[0])} s)"
            parts.append(_bar(at, top, width, height - 5, layer.colour, title))
            at += width
    return _svg(parts, label, {}, height=8 + height * len(rows))


def _versions(begin: float, end: float) -> str:
    """The versions of a bin from one edge to the next; an edge may lie half a version before its version."""
    first, last = ceil(begin), ceil(end) - 1
    return f"{first}" if last <= first else f"{first} to {last}"


def legend_of(rows: Iterable[tuple[str, Sequence[Layer]]]) -> list[tuple[str, str]]:
    """(name, colour) of the layers of all rows, each once."""
    return list(dict.fromkeys((layer.name, layer.colour) for _, layers in rows for layer in layers))


def _figures(one: CurveBin) -> str:
    spread = f" ({number(one.low)} to {number(one.high)})" if one.high > one.low else ""
    return f"{number(one.mean)}{spread}"


def _bar(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    where = f'x="{place(x)}" y="{place(y)}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect class="fill {colour}" {where}><title>{escape(title)}</title></rect>'


def _frame(xs: Axis, ys: Axis, x_label: str, x_names: Sequence[str] = ()) -> str:
    """Grid, ticks and labels."""
    parts = []
    for tick in ys.ticks(4):
        y = place(ys(tick))
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(_tick(LEFT - 5, ys(tick) + 3.5, "end", number(tick)))
    ticks = [(xs(tick), name) for tick, name in _x_ticks(xs, x_label, x_names)]
    parts += [_tick(at, HEIGHT - BOTTOM + 12, _anchor(at, name), name) for at, name in ticks]
    return "".join([*parts, _tick((LEFT + WIDTH - RIGHT) // 2, HEIGHT - 3, "middle", x_label)])


def _tick(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text class="tick" x="{place(x)}" y="{place(y)}" text-anchor="{anchor}">{escape(text)}</text>'


def _anchor(at: float, name: str) -> str:
    """How a name stands at its place, so that it ends within the chart."""
    half = CHARACTER * len(name) / 2
    return "end" if at + half > WIDTH else "start" if at - half < 0 else "middle"


def _x_ticks(xs: Axis, x_label: str, x_names: Sequence[str]) -> list[tuple[float, str]]:
    if x_names:
        return [(float(i), name[:MAX_NAME]) for i, name in enumerate(x_names)]
    return [(tick, number(tick)) for tick in xs.ticks(5) if x_label not in WHOLE or tick == round(tick)]


def _band(line: PlotLine, xs: Axis, ys: Axis) -> str:
    if len(line.bins) < 2 or all(one.low == one.high for one in line.bins):
        if len(line.bins) == 1 and line.bins[0].low < line.bins[0].high:
            one = line.bins[0]
            path = f"M{place(xs(one.x))} {place(ys(one.low))}V{place(ys(one.high))}"
            return f'<path class="line {line.colour}" d="{path}"/>'
        return ""
    up = [f"{place(xs(one.x))} {place(ys(one.high))}" for one in line.bins]
    down = [f"{place(xs(one.x))} {place(ys(one.low))}" for one in reversed(line.bins)]
    return f'<path class="band {line.colour}" d="M{"L".join([*up, *down])}Z"/>'


def _line(line: PlotLine, xs: Axis, ys: Axis) -> str:
    points = [f"{place(xs(one.x))} {place(ys(one.mean))}" for one in line.bins]
    drawn = f'<path class="line {line.colour}" d="M{"L".join(points)}"/>'
    if len(points) > MAX_MARKS:
        return drawn
    marks = "".join(f'<circle cx="{x}" cy="{y}" r="2"/>' for x, y in (point.split() for point in points))
    return f'{drawn}<g class="fill {line.colour}">{marks}</g>'


def _steps(edges: Sequence[float], values: Sequence[float], xs: Axis, ys: Axis) -> list[str]:
    points = []
    for (begin, end), value in zip(pairwise(edges), values, strict=True):
        points += [f"{place(xs(begin))} {place(ys(value))}", f"{place(xs(end))} {place(ys(value))}"]
    return points


def _svg(
    parts: Sequence[str],
    label: str,
    hover: Mapping[str, Mapping[float, str]],
    xs: Axis | None = None,
    x_label: str = "",
    *,
    names_of_x: Mapping[float, str] | None = None,
    height: int = HEIGHT,
) -> Markup:
    """The element. `hover`: name -> x -> text, for page.js."""
    data = ""
    if xs is not None:
        at = sorted({x for texts in hover.values() for x in texts})
        table = [[name, [texts.get(x, "") for x in at]] for name, texts in hover.items()]
        names = [(names_of_x or {}).get(x, f"{x:g}") for x in at]
        whole = {"label": x_label, "x": names, "at": [round(xs(x), 1) for x in at], "rows": table}
        data = f" data-hover='{_quoted(json.dumps(whole, separators=(',', ':')))}'"
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}"{data}>'
    return Markup(f"{head}{''.join(parts)}</svg>")


def _quoted(text: str) -> str:
    """For an attribute in single quotes: JSON has many double ones, which would grow fivefold."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#39;")

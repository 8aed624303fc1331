"""One curve as an SVG picture, both axes logarithmic; knows nothing of what is plotted."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 70, 130, 40, 50  # margins
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
GREY, LIGHT = "#555555", "#dddddd"


def svg(title: str, x_name: str, y_name: str, curves: Mapping[str, Points]) -> str:
    """Raises ValueError unless every coordinate is above 0 and there is a point."""
    points = [point for curve in curves.values() for point in curve]
    if not points or min(min(point) for point in points) <= 0:
        raise ValueError("logarithmic axes show numbers above 0, and one point at least")
    x, y = Axis([x for x, _ in points], LEFT, WIDTH - RIGHT), Axis([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = [text(LEFT, 22, title, size=14), *grid(x, y)]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_name, anchor="middle"))
    parts.append(text(LEFT, TOP - 6, y_name, color=GREY))
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        placed = [(x.place(a), y.place(b)) for a, b in sorted(curve)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in placed]
        parts.append(text(placed[-1][0] + 8, placed[-1][1] + 4, name, color=color))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


class Axis:
    """Numbers to places between `start` and `stop`."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        self._low, high = math.log(min(values)), math.log(max(values))
        self._span = high - self._low or 1.0
        self._start, self._stop = start, stop
        self.ticks = ticks(min(values), max(values))

    def place(self, value: float) -> float:
        return self._start + (math.log(value) - self._low) / self._span * (self._stop - self._start)


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten within the range; of a wide range the powers alone."""
    steps = (1, 2, 5) if high < 500 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for value in x.ticks:
        at = x.place(value)
        parts.append(f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="{LIGHT}"/>')
        parts.append(text(at, HEIGHT - BOTTOM + 16, f"{value:g}", anchor="middle", color=GREY))
    for value in y.ticks:
        at = y.place(value)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="{LIGHT}"/>')
        parts.append(text(LEFT - 6, at + 4, f"{value:g}", anchor="end", color=GREY))
    return parts


def text(x: float, y: float, words: str, *, anchor: str = "start", color: str = "black", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{escape(words)}</text>'
    )

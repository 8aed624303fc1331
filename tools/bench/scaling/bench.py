"""Bench `curves`: how cost grows with slots, context, and the number of members; with pictures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Protocol

from tools.bench.harness import worker_process
from tools.bench.harness.protocol import Figures
from tools.bench.harness.worker_process import ROOT

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


FOLDER = ROOT / "docs" / "curves"
ROUNDS = 5
SLOTS, SLOTS_CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128), (64, 512)
CONTEXTS, CONTEXTS_SLOTS = (32, 64, 128, 256, 512, 1024, 2048), (8, 32)
SEQUENCES = (64, 256, 1024, 4096, 8192, 16384)
RANKS, RANK_STEPS, RANK_ROUNDS = (16, 64, 256), 5, 1


class CurveHalf(Protocol):
    def ask(self, do: str, **arguments: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Curve:
    """One picture. Points of its lines are (what grows, cost)."""

    file: str
    title: str
    x_name: str
    y_name: str
    lines: dict[str, Points]


class CurvesBench:
    about = "how cost grows, plotted into docs/curves: engine step by slots and context, packing by n, head by ranks"

    def measure(self, *, quiet: bool) -> Figures:
        """CPU time; medians of rounds that go over all points in turn."""
        with worker_process.ours("scaling.ours") as ours:
            curves = draw(ours)
        write(curves, FOLDER)
        return figures(curves)


def draw(ours: CurveHalf) -> list[Curve]:
    """All curves."""

    def line(do: str, scale: float, rounds: int, points: list[tuple[int, dict[str, int]]]) -> Points:
        costs: dict[int, list[float]] = {x: [] for x, _ in points}
        for _ in range(rounds):
            for x, arguments in points:
                costs[x].append(scale * ours.ask(do, **arguments))
        return [(x, median(seen)) for x, seen in costs.items()]

    by_slots = {
        f"{context} positions": line("engine", 1e3, ROUNDS, [(n, {"slots": n, "context": context}) for n in SLOTS])
        for context in SLOTS_CONTEXTS
    }
    by_context = {
        f"{slots} slots": line("engine", 1e3, ROUNDS, [(n, {"slots": slots, "context": n}) for n in CONTEXTS])
        for slots in CONTEXTS_SLOTS
    }
    packing = {"pack": line("packing", 1e3, ROUNDS, [(n, {"n": n}) for n in SEQUENCES])}
    asked = [(n, {"ranks": n, "steps": RANK_STEPS, "rounds": ROUNDS}) for n in RANKS]
    head = {"head": line("head", 1e6, RANK_ROUNDS, asked)}
    return [
        Curve("engine-slots", "A decode step, by slots", "slots", "ms of CPU", by_slots),
        Curve("engine-context", "A decode step, by context", "positions", "ms of CPU", by_context),
        Curve("packing", "Sequences into micro-batches", "sequences", "ms of CPU", packing),
        Curve("head", "The head's decisions for a trajectory", "ranks", "us of CPU", head),
    ]


def write(curves: list[Curve], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for curve in curves:
        picture = svg(curve.title, curve.x_name, curve.y_name, curve.lines)
        (folder / f"{curve.file}.svg").write_text(picture)


def figures(curves: list[Curve]) -> Figures:
    """Every point, by curve, line and what grows."""
    found: Figures = {"bench": "curves"}
    for curve in curves:
        for name, points in curve.lines.items():
            for x, cost in points:
                found[f"{curve.file}: {name} at {x:g}"] = round(cost, 4)
    return found

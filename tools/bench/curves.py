"""How cost grows, as curves in docs/curves: an engine's step, packing, and the head's work for a trajectory."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from tools.bench import side
from tools.bench.plot import Points, svg
from tools.bench.protocol import Figures
from tools.bench.side import ROOT

FOLDER = ROOT / "docs" / "curves"
ROUNDS = 5
SLOTS, SLOTS_CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128), (64, 512)
CONTEXTS, CONTEXTS_SLOTS = (32, 64, 128, 256, 512, 1024, 2048), (8, 32)
SEQUENCES = (64, 256, 1024, 4096, 8192, 16384)
RANKS, RANK_STEPS, RANK_ROUNDS = (16, 64, 256), 5, 1


class Half(Protocol):
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
        with side.ours("curves") as ours:
            curves = draw(ours)
        write(curves, FOLDER)
        return figures(curves)


def draw(ours: Half) -> list[Curve]:
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

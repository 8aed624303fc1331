"""Draws the rewards of the bench `parity`: means over seeds with standard errors, over samples and over seconds."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

NAMES = {"ours-0": "AReaL-Bus, eta 0", "ours-1": "AReaL-Bus, eta 1", "trl": "TRL GRPOTrainer"}
WINDOW = 3  # updates of a running mean
N_PLACES = 60  # of the axis of seconds

Points = list[tuple[float, float, float]]  # (x, mean, standard error)


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], batch: int, path: Path) -> bool:
    """An SVG with two panels. False without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    with rc_context({"svg.hashsalt": "parity", "font.size": 9}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, name in zip(panels, ("samples", "seconds of training"), strict=True):
            for side, lines in runs.items():
                points = over_samples(lines, batch) if name == "samples" else over_seconds(lines)
                x, mean, error = zip(*points, strict=True)
                axes.plot(x, mean, label=NAMES[side], linewidth=1)
                low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
                axes.fill_between(x, low, high, alpha=0.2)
            axes.set_xlabel(name)
            axes.grid(alpha=0.3)
        panels[0].set_ylabel(f"reward, mean of {WINDOW} updates")
        panels[0].legend(fontsize=7)
        figure.savefig(path, metadata={"Date": None})
    return True


def smooth(line: Mapping[str, Any]) -> list[float]:
    """The reward of each update as the mean of the last WINDOW ones."""
    rewards = [update["reward"] for update in line["updates"]]
    return [fmean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]


def over_samples(lines: Sequence[Mapping[str, Any]], batch: int) -> Points:
    each = [smooth(line) for line in lines]
    return [(batch * (i + 1), *band(values)) for i, values in enumerate(zip(*each, strict=True))]


def over_seconds(lines: Sequence[Mapping[str, Any]]) -> Points:
    """From the moment when every run has an update to that when the first one ends."""
    times = [[update["s"] for update in line["updates"]] for line in lines]
    each = [smooth(line) for line in lines]
    low, high = max(one[0] for one in times), min(one[-1] for one in times)
    places = [low + (high - low) * i / (N_PLACES - 1) for i in range(N_PLACES)] if high > low else [low]
    return [
        (x, *band([rewards[max(0, bisect_right(at, x) - 1)] for at, rewards in zip(times, each, strict=True)]))
        for x in places
    ]


def band(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error); the error of one value is 0."""
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
